"""The first rows of a pool, compared with its spec before they travel. Knows nothing of streams or environments.

What fails here has never worked, so a retry would fail in the same way; the learner checks the later rows.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seedrl.errors import EnvFailed
from seedrl.rows import KNOWN_FLAGS, Rows
from seedrl.specs import ArraySpec, EnvSpec, leaves, names

FIRST_STEPS = 20  # rows of each environment; a pool that fails before has never worked


class FirstRows:
    """Checks rows until each environment has had its first steps. Owned by the thread that receives rows."""

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        self._spec = spec
        self._num_envs = num_envs
        self._left = FIRST_STEPS * num_envs

    @property
    def are_over(self) -> bool:
        """Return whether the environments have had their first steps. For any thread."""
        return self._left <= 0

    def check(self, rows: Rows) -> None:
        """Raise EnvFailed for rows that are not as the spec says, if they are among the first."""
        if self.are_over:
            return
        for fault in faults_of_rows(rows, self._spec, self._num_envs):
            raise EnvFailed(fault)
        self._left -= len(rows.env_id)


def faults_of_rows(rows: Rows, spec: EnvSpec, num_envs: int) -> Iterator[str]:
    """Yield in words how rows differ from the spec of their pool."""
    count = len(rows.env_id)
    if not count or not ((rows.env_id >= 0) & (rows.env_id < num_envs)).all():
        yield f"env_id: expected numbers from 0 to {num_envs - 1}, saw {rows.env_id.tolist()}"
    if names(rows.observation) != names(spec.observation):
        yield f"observation: expected the leaves {names(spec.observation)}, saw {names(rows.observation)}"
        return
    for name, leaf, expected in zip(
        names(rows.observation), leaves(rows.observation), leaves(spec.observation), strict=True
    ):
        yield from _faults_of_leaf(f"observation {name}".rstrip(), leaf, expected, count)
    yield from _faults_of_leaf("reward", rows.reward, ArraySpec((), "float32"), count)
    if rows.flags.shape != (count,) or any(flags not in KNOWN_FLAGS for flags in rows.flags.tolist()):
        yield f"flags: expected {count} sums of 1, 2, 4 and 8, saw {rows.flags.tolist()}"


def _faults_of_leaf(label: str, leaf: NDArray[Any], expected: ArraySpec, count: int) -> Iterator[str]:
    shape = (count, *expected.shape)
    if not isinstance(leaf, np.ndarray) or leaf.shape != shape or leaf.dtype.name != expected.dtype:
        seen = f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, np.ndarray) else type(leaf).__name__
        yield f"{label}: expected {expected.dtype}{list(shape)}, as the pool's spec says, saw {seen}"
    elif leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
        yield f"{label}: expected finite numbers, saw {leaf[~np.isfinite(leaf)][0]}"
    elif expected.values and not ((leaf >= 0) & (leaf < expected.values)).all():
        outside = leaf[(leaf < 0) | (leaf >= expected.values)]
        yield f"{label}: expected categories from 0 to {expected.values - 1}, saw {outside[0]}"
