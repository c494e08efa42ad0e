"""Masks that come beside observations, as one more leaf of them. Knows nothing of environments."""

from typing import Any

import numpy as np

from seedrl.specs import MASK, ArraySpec, EnvSpec

OBSERVATION = "observation"  # the leaf beside a mask


def mask_spec(info: dict[str, Any], spec: EnvSpec) -> ArraySpec | None:
    """Return the spec of the mask in info, if there is one and it is not in the observations already."""
    return ArraySpec(np.shape(info[MASK]), "int8") if MASK in info and spec.mask is None else None


def with_mask(spec: EnvSpec, mask: ArraySpec) -> EnvSpec:
    return EnvSpec(beside_mask(spec.observation, mask), spec.action)


def beside_mask(tree: Any, mask: Any) -> Any:
    """Return a tree with one more leaf, in the order of names."""
    others = tree if isinstance(tree, dict) else {OBSERVATION: tree}
    return dict(sorted({**others, MASK: mask}.items()))
