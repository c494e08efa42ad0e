"""Shapes and types of an environment's observations and actions. Knows nothing of torch, envpool or the wire.

Observations and actions are *trees*: a plain array, or a flat dict of named arrays. A nested space is flattened by the
actor, names joined by "/": {"camera": {"left": …}} has the leaf "camera/left", and a tuple the leaves "0",
"1" … Leaves are in the order of their names.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Arrays = NDArray[Any] | dict[str, NDArray[Any]]  # a tree of arrays, each with the same number of rows

# The types that an observation may have. Each of them has a torch dtype of the same name.
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
MAX_CHANNELS = 4  # of an image [height, width, channels]
MASK = "action_mask"  # the name, at any depth, of the leaf that tells which choices are allowed

Leaf = TypeVar("Leaf")
Other = TypeVar("Other")


def leaves(tree: Leaf | dict[str, Leaf]) -> list[Leaf]:
    return list(tree.values()) if isinstance(tree, dict) else [tree]


def names(tree: Any) -> list[str]:
    """Return the names of the leaves; a plain array has the empty name."""
    return list(tree) if isinstance(tree, dict) else [""]


def as_tree(shape: Any, leaves: Sequence[Leaf]) -> Leaf | dict[str, Leaf]:
    """Return a tree of these leaves with the names of another tree."""
    return dict(zip(shape, leaves, strict=True)) if isinstance(shape, dict) else leaves[0]


def tree_map(function: Callable[[Leaf], Other], tree: Leaf | dict[str, Leaf]) -> Other | dict[str, Other]:
    """Apply a function to every leaf."""
    return {name: function(leaf) for name, leaf in tree.items()} if isinstance(tree, dict) else function(tree)


def rows_of(tree: Arrays, start: int, count: int) -> Arrays:
    """Return `count` rows of every leaf."""
    return tree_map(lambda leaf: leaf[start : start + count], tree)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and numpy type name of one row; `values` is not 0 if its entries are categories 0 … values-1."""

    shape: tuple[int, ...]
    dtype: str
    values: int = 0

    nbytes: int = field(init=False, repr=False, compare=False)
    channel_axis: int = field(init=False, repr=False, compare=False)  # frames are joined along it

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.shape) * np.dtype(self.dtype).itemsize)
        object.__setattr__(self, "channel_axis", 2 if _has_channels_last(self.shape) else 0)

    def stacked(self, frames: int) -> "ArraySpec":
        """Return the spec of this many frames, oldest first, joined along their channels.

        Those are the last axis of images [height, width, channels], and the first axis of everything else.
        """
        if frames == 1:
            return self
        shape = list(self.shape or (1,))
        shape[self.channel_axis] *= frames
        stacked = ArraySpec(tuple(shape), self.dtype, self.values)
        object.__setattr__(stacked, "channel_axis", self.channel_axis)  # many channels do not look like channels
        return stacked

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" + (f" below {self.values}" if self.values else "")


@dataclass(frozen=True, slots=True)
class CategoricalSpec:
    """Discrete actions: entry i of an array of this shape is one of 0 … sizes[i]-1."""

    sizes: tuple[int, ...]
    shape: tuple[int, ...] = ()

    dtype = "int32"  # as sent to the environments

    @property
    def policy_size(self) -> int:
        return sum(self.sizes)

    def __str__(self) -> str:
        return f"{self.sizes[0]} actions" if not self.shape else f"choices of {_few(self.sizes)}"


@dataclass(frozen=True, slots=True)
class ContinuousSpec:
    """Continuous actions, each entry between its own bounds, which may be infinite."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    shape: tuple[int, ...]

    dtype = "float32"

    @property
    def policy_size(self) -> int:
        return 2 * len(self.low)

    def __str__(self) -> str:
        return f"continuous{list(self.shape)} from {_few(self.low)} to {_few(self.high)}"


ActionSpec = CategoricalSpec | ContinuousSpec


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """The trees of an environment's observations and actions."""

    observation: ArraySpec | dict[str, ArraySpec]
    action: ActionSpec | dict[str, ActionSpec]

    @property
    def observations(self) -> list[ArraySpec]:
        """Return the leaves of the observation."""
        return leaves(self.observation)

    @property
    def actions(self) -> list[ActionSpec]:
        """Return the leaves of the action."""
        return list(self.action.values()) if isinstance(self.action, dict) else [self.action]

    @property
    def row_bytes(self) -> int:
        """Return the size of one observation."""
        return sum(leaf.nbytes for leaf in self.observations)

    @property
    def policy_size(self) -> int:
        """Return how many parameters a policy outputs for one row; see seedrl/actions.py."""
        return sum(leaf.policy_size for leaf in self.actions)

    @property
    def mask(self) -> str | None:
        """Return the name of the leaf that tells which choices are allowed, if there is one."""
        found = [name for name in names(self.observation) if name.rpartition("/")[2] == MASK]
        return found[0] if found else None

    def stacked(self, frames: int) -> "EnvSpec":
        """Return the spec of what a policy sees: this many of the newest frames."""
        if not isinstance(self.observation, dict):
            return EnvSpec(self.observation.stacked(frames), self.action)
        return EnvSpec({name: leaf.stacked(frames) for name, leaf in self.observation.items()}, self.action)

    def __str__(self) -> str:
        return f"observation {_words(self.observation)}, {_words(self.action)}"


def encoded_spec(spec: EnvSpec) -> dict[str, Any]:
    """Return a spec as plain JSON values; a leaf without a name has the name ""."""
    return {
        "observation": {name: _encoded(leaf) for name, leaf in _named(spec.observation)},
        "action": {name: _encoded(leaf) for name, leaf in _named(spec.action)},
    }


def decoded_spec(spec: dict[str, Any]) -> EnvSpec:
    """Return the spec of `encoded_spec`. Raises KeyError, TypeError or AttributeError for any other value."""
    observation = {name: ArraySpec(**_tuples(leaf)) for name, leaf in spec["observation"].items()}
    action = {
        name: CategoricalSpec(**_tuples(leaf)) if "sizes" in leaf else ContinuousSpec(**_tuples(leaf))
        for name, leaf in spec["action"].items()
    }
    return EnvSpec(_plain_if_unnamed(observation), _plain_if_unnamed(action))


def _named(tree: Any) -> list[tuple[str, Any]]:
    return list(zip(names(tree), leaves(tree), strict=True))


def _plain_if_unnamed(tree: dict[str, Any]) -> Any:
    return tree[""] if list(tree) == [""] else tree


def _encoded(leaf: ArraySpec | ActionSpec) -> dict[str, Any]:
    values = {each.name: getattr(leaf, each.name) for each in fields(leaf) if each.init}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _tuples(leaf: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in leaf.items()}


def discrete(count: int) -> CategoricalSpec:
    """Return the spec of one choice among 0 … count-1."""
    return CategoricalSpec((count,))


def _has_channels_last(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[2] <= MAX_CHANNELS < shape[0]


def _words(tree: Any) -> str:
    if not isinstance(tree, dict):
        return str(tree)
    return "{" + ", ".join(f"{name}: {leaf}" for name, leaf in tree.items()) + "}"


def _few(numbers: Sequence[float]) -> str:
    """Format numbers briefly: one if all are the same, otherwise the first few different ones."""
    shown = [f"{number:g}" for number in dict.fromkeys(numbers)]
    return shown[0] if len(shown) == 1 else "[" + ", ".join([*shown[:6], *(["…"] if len(shown) > 6 else [])]) + "]"
