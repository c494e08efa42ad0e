"""What an environment's observations and actions look like. Knows nothing of torch, envpool or the wire.

Observations and actions are *trees*: a plain array, or a flat dict of named ones. A nested space is flattened where the
environments are, names joined by "/": {"camera": {"left": …}} has the leaf "camera/left", and a tuple the leaves "0",
"1" … Leaves are in the order of their names.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Arrays = NDArray[Any] | dict[str, NDArray[Any]]  # a tree of them, of n rows each

# What an observation may be made of. All of them have a torch dtype of the same name.
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
MASK = "action_mask"  # the leaf, of that name at any depth, that says which choices are allowed

Leaf = TypeVar("Leaf")
Other = TypeVar("Other")


def leaves(tree: Leaf | dict[str, Leaf]) -> list[Leaf]:
    return list(tree.values()) if isinstance(tree, dict) else [tree]


def names(tree: Any) -> list[str]:
    """Of the leaves; a plain array has none."""
    return list(tree) if isinstance(tree, dict) else [""]


def as_tree(shape: Any, leaves: Sequence[Leaf]) -> Leaf | dict[str, Leaf]:
    """A tree with the names of another one."""
    return dict(zip(shape, leaves, strict=True)) if isinstance(shape, dict) else leaves[0]


def tree_map(function: Callable[[Leaf], Other], tree: Leaf | dict[str, Leaf]) -> Other | dict[str, Other]:
    """The tree of what a function makes of every leaf."""
    return {name: function(leaf) for name, leaf in tree.items()} if isinstance(tree, dict) else function(tree)


def rows_of(tree: Arrays, start: int, count: int) -> Arrays:
    """Some rows of every leaf."""
    return tree_map(lambda leaf: leaf[start : start + count], tree)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and numpy type name of one row; `values` if its entries are categories 0 … values-1 and not amounts."""

    shape: tuple[int, ...]
    dtype: str
    values: int = 0

    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.shape) * np.dtype(self.dtype).itemsize)

    def stacked(self, frames: int) -> "ArraySpec":
        """`frames` of these, oldest first, joined along the first axis."""
        if frames == 1:
            return self
        first, *others = self.shape or (1,)
        return ArraySpec((frames * first, *others), self.dtype, self.values)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" + (f" below {self.values}" if self.values else "")


@dataclass(frozen=True, slots=True)
class CategoricalSpec:
    """Actions that choose: entry i of an array of this shape is one of 0 … sizes[i]-1."""

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
    """Actions that are amounts, each between its own bounds, which may be infinite."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    shape: tuple[int, ...]

    dtype = "float32"

    @property
    def policy_size(self) -> int:
        return 2 * len(self.low)

    def __str__(self) -> str:
        return f"numbers{list(self.shape)} from {_few(self.low)} to {_few(self.high)}"


ActionSpec = CategoricalSpec | ContinuousSpec


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """One environment: the trees of its observations and of its actions."""

    observation: ArraySpec | dict[str, ArraySpec]
    action: ActionSpec | dict[str, ActionSpec]

    @property
    def observations(self) -> list[ArraySpec]:
        """The leaves."""
        return leaves(self.observation)

    @property
    def actions(self) -> list[ActionSpec]:
        """The leaves."""
        return list(self.action.values()) if isinstance(self.action, dict) else [self.action]

    @property
    def row_bytes(self) -> int:
        """Of one observation."""
        return sum(leaf.nbytes for leaf in self.observations)

    @property
    def policy_size(self) -> int:
        """How many numbers a policy gives for one row: a logit for each choice, mean and log-deviation of a number."""
        return sum(leaf.policy_size for leaf in self.actions)

    @property
    def mask(self) -> str | None:
        """The name of the leaf that says which choices are allowed."""
        found = [name for name in names(self.observation) if name.rpartition("/")[2] == MASK]
        return found[0] if found else None

    def stacked(self, frames: int) -> "EnvSpec":
        """The same, as a policy sees it: with so many of the newest frames."""
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
    """One choice of 0 … count-1."""
    return CategoricalSpec((count,))


def _words(tree: Any) -> str:
    if not isinstance(tree, dict):
        return str(tree)
    return "{" + ", ".join(f"{name}: {leaf}" for name, leaf in tree.items()) + "}"


def _few(numbers: Sequence[float]) -> str:
    """All of them if they differ, one if not."""
    shown = [f"{number:g}" for number in dict.fromkeys(numbers)]
    return shown[0] if len(shown) == 1 else "[" + ", ".join([*shown[:6], *(["…"] if len(shown) > 6 else [])]) + "]"
