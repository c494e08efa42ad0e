"""Specs ⇄ the spaces in a Ready message. Knows nothing of the other messages.

Reading trusts no peer: every name, shape and size is checked before a spec is made of it.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from seedrl.errors import InvalidMessage
from seedrl.specs import (
    DTYPES,
    MASK,
    ActionSpec,
    ArraySpec,
    CategoricalSpec,
    ContinuousSpec,
    EnvSpec,
    names,
)
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire.framing import MAX_LEAVES

MAX_NAME = 128
MAX_RANK = 8
MAX_CHOICES = 65_536  # of all leaves together; a continuous entry counts as two


def encode_spaces(spec: EnvSpec) -> pb.Ready:
    observation = [
        pb.Array(name=name, shape=leaf.shape, dtype=leaf.dtype, values=leaf.values)
        for name, leaf in zip(names(spec.observation), spec.observations, strict=True)
    ]
    action = [_encode_action(*named) for named in zip(names(spec.action), spec.actions, strict=True)]
    return pb.Ready(observation=observation, action=action)


def _encode_action(name: str, leaf: ActionSpec) -> pb.Action:
    if isinstance(leaf, CategoricalSpec):
        return pb.Action(name=name, shape=leaf.shape, choices=leaf.sizes)
    return pb.Action(name=name, shape=leaf.shape, low=leaf.low, high=leaf.high)


def decode_spaces(ready: pb.Ready) -> EnvSpec:
    """Return the spec. Raises InvalidMessage naming the field that is wrong."""
    spec = EnvSpec(
        _tree("observation", ready.observation, _decode_array),
        _tree("action", ready.action, _decode_action),
    )
    choices = sum(leaf.policy_size for leaf in spec.actions if isinstance(leaf, CategoricalSpec))
    if spec.policy_size > MAX_CHOICES:
        raise InvalidMessage(
            f"action: expected at most {MAX_CHOICES} choices, a continuous entry counted as two, saw {choices} choices "
            f"and {(spec.policy_size - choices) // 2} continuous entries"
        )
    if spec.mask is not None:
        _expect_mask(spec, choices)
    return spec


def _tree(field: str, messages: Sequence[Any], decode: Any) -> Any:
    """Return the leaves as a tree, which is a plain leaf if there is one leaf without a name."""
    if not 1 <= len(messages) <= MAX_LEAVES:
        raise InvalidMessage(f"{field}: expected 1 to {MAX_LEAVES} leaves, saw {len(messages)}")
    found = [message.name for message in messages]
    if found == [""]:
        return decode(field, messages[0])
    for name in found:
        if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
            raise InvalidMessage(f"{field}.name: expected 1 to {MAX_NAME} printable characters, saw {name[:32]!r}")
    if found != sorted(set(found)):
        raise InvalidMessage(f"{field}.name: expected sorted names without repeats, saw {' '.join(found)[:256]}")
    return {message.name: decode(field, message) for message in messages}


def _decode_array(field: str, array: pb.Array) -> ArraySpec:
    shape = _decode_shape(field, array.shape)
    if array.dtype not in DTYPES:
        raise InvalidMessage(f"{field}.dtype: expected one of {', '.join(DTYPES)}, saw {array.dtype[:32]!r}")
    if array.values > MAX_CHOICES or (array.values and np.dtype(array.dtype).kind not in "iu"):
        raise InvalidMessage(
            f"{field}.values: expected at most {MAX_CHOICES}, with an integer dtype, saw {array.values} "
            f"with {array.dtype}"
        )
    return ArraySpec(shape, array.dtype, array.values)


def _decode_action(field: str, action: pb.Action) -> ActionSpec:
    shape = _decode_shape(field, action.shape)
    count = math.prod(shape)
    if action.choices:
        if action.low or action.high:
            raise InvalidMessage(f"{field}.choices: expected none beside low and high, saw {len(action.choices)}")
        if len(action.choices) != count or not 2 <= min(action.choices) <= max(action.choices) <= MAX_CHOICES:
            raise InvalidMessage(
                f"{field}.choices: expected {count} of 2 to {MAX_CHOICES}, saw {list(action.choices[:8])}"
            )
        return CategoricalSpec(tuple(action.choices), shape)
    low, high = tuple(action.low), tuple(action.high)
    if not len(low) == len(high) == count or not all(map(float.__lt__, low, high)):
        raise InvalidMessage(
            f"{field}.low, high: expected {count} each, low below high, saw {list(low[:8])} and {list(high[:8])}"
        )
    return ContinuousSpec(low, high, shape)


def _decode_shape(field: str, shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) > MAX_RANK or 0 in shape:
        raise InvalidMessage(f"{field}.shape: expected up to {MAX_RANK} positive sizes, saw {list(shape[:10])}")
    return tuple(shape)


def _expect_mask(spec: EnvSpec, choices: int) -> None:
    """Expect a mask with one entry for each choice, in the order of the leaves of an action."""
    leaf = spec.observation[spec.mask] if isinstance(spec.observation, dict) and spec.mask else None
    if leaf is None or math.prod(leaf.shape) != choices or np.dtype(leaf.dtype).kind not in "biu":
        raise InvalidMessage(f"observation.{MASK}: expected {choices} integers, one for each choice, saw {leaf}")
