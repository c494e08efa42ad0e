"""Converts spaces to trees of specs, and values in both directions.

A space is one of Gymnasium's, by whomever, or made of seedrl.specs: ArraySpec, CategoricalSpec,
ContinuousSpec, and dicts or tuples of these. Gymnasium's are known by the names of their classes, so neither gymnasium
nor envpool is needed here.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seedrl.errors import ConfigError, EnvFailed
from seedrl.specs import DTYPES, ActionSpec, Arrays, ArraySpec, CategoricalSpec, ContinuousSpec, EnvSpec

OWN = (ArraySpec, CategoricalSpec, ContinuousSpec)
INTEGERS = ("Discrete", "MultiDiscrete", "MultiBinary")
SUPPORTED = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these"
WIDER = {"uint16": "int32", "uint32": "int64"}  # what torch lacks


class LeafPath(NamedTuple):
    """The position of a leaf in a value nested like its space, and the space there."""

    path: tuple[Any, ...]  # keys, from the outside in
    space: Any
    start: NDArray[np.int64] | None  # what categories count from, if that is not zero

    def of(self, value: Any) -> Any:
        for key in self.path:
            value = getattr(value, key) if isinstance(key, str) and hasattr(value, "_fields") else value[key]
        return value


def spec_of(observation: Any, action: Any, env: str) -> EnvSpec:
    """Return the spec of an environment with these spaces. Raises ConfigError for spaces that cannot be streamed."""
    try:
        return EnvSpec(ObservationSpace(observation).spec, ActionSpace(action).spec)
    except ConfigError as error:
        raise ConfigError(f"{env} has observations of {observation} and actions of {action}: {error}") from None


class ObservationSpace:
    """`spec` and the observations that fit it. Raises ConfigError if they cannot be streamed."""

    def __init__(self, space: Any) -> None:
        self._places = _places(space)
        self._specs = {name: _array(place.space) for name, place in self._places.items()}
        self.spec: ArraySpec | dict[str, ArraySpec] = _tree(self._specs)

    def rows(self, values: Any, count: int) -> Arrays:
        """Return observations of many environments as a tree of contiguous arrays [count, ...]."""
        return self._each(lambda place: place.of(values), count)

    def stacked(self, values: Sequence[Any]) -> Arrays:
        """Return the leaves of several observations, stacked."""
        return self._each(lambda place: [np.asarray(place.of(value)) for value in values], len(values))

    def faults(self, value: Any) -> Iterator[str]:
        """Yield in words how one observation differs from the space, leaf by leaf."""
        for name, place in self._places.items():
            try:
                leaf = np.asarray(place.of(value))
            except (KeyError, IndexError, TypeError, AttributeError):
                yield f"{_label(name)}: expected {self._specs[name]}, as observation_space has it, saw none"
            except ValueError:  # lists of different lengths
                yield f"{_label(name)}: expected {self._specs[name]}, as observation_space has it, saw no array"
            else:
                yield from _faults(_label(name), leaf, place.start, self._specs[name])

    def excesses(self, value: Any) -> Iterator[str]:
        """Yield in words which leaves of an observation are outside the bounds of their Box; such are taken anyway."""
        for name, place in self._places.items():
            if _kind(place.space) == "Box":
                leaf = np.asarray(place.of(value)).reshape(place.space.shape)
                outside = (leaf < place.space.low) | (leaf > place.space.high)
                if outside.any():
                    yield f"{_label(name)}: it leaves the bounds of observation_space, {place.space}"

    def _each(self, found: Callable[[LeafPath], Any], count: int) -> Arrays:
        arrays: Arrays = _tree(
            {name: _rows(found(place), place.start, self._specs[name], count) for name, place in self._places.items()}
        )
        return arrays


class ActionSpace:
    """`spec`, and actions that fit it as the environment wants them. Raises ConfigError if there are none such."""

    def __init__(self, space: Any) -> None:
        self._space = space
        self._places = _places(space)
        self.spec: ActionSpec | dict[str, ActionSpec] = _tree(
            {name: _action(place.space) for name, place in self._places.items()}
        )

    def nested(self, action: Arrays) -> Any:
        """Return actions of one environment or of many, [...] or [n, ...], nested like the space and of its types."""
        found = action if isinstance(action, dict) else {"": action}
        return _nested(self._space, {name: _taken(found[name], place) for name, place in self._places.items()})


def _nested(space: Any, values: dict[str, Any], name: str = "") -> Any:
    if not _is_nested(space):
        return values[name]
    below = {key: _nested(each, values, _join(name, key)) for key, each in _children(space)}
    return below if _kind(space) == "Dict" else tuple(below.values())


def _places(space: Any) -> dict[str, LeafPath]:
    """Return the leaves in the order of their names, as in seedrl.specs."""
    found = list(_walk(space, "", ()))
    names = [name for name, _ in found]
    if not found or len(set(names)) < len(names):
        raise ConfigError(f"its leaves have to have different names, one of them at least, and are {sorted(names)}")
    return dict(sorted(found))


def _walk(space: Any, name: str, path: tuple[Any, ...]) -> Iterator[tuple[str, LeafPath]]:
    if not _is_nested(space):
        start = np.asarray(getattr(space, "start", 0), np.int64)
        yield name, LeafPath(path, space, start if start.any() else None)
        return
    for key, each in _children(space):
        yield from _walk(each, _join(name, key), (*path, key))


def _kind(space: Any) -> str:
    if isinstance(space, dict | tuple):
        return "Dict" if isinstance(space, dict) else "Tuple"
    names = {each.__name__ for each in type(space).__mro__}
    return next((kind for kind in ("Dict", "Tuple", "Box", *INTEGERS) if kind in names), type(space).__name__)


def _is_nested(space: Any) -> bool:
    return not isinstance(space, OWN) and _kind(space) in ("Dict", "Tuple")


def _children(space: Any) -> Iterator[tuple[Any, Any]]:
    inner: Any = space if isinstance(space, dict | tuple) else space.spaces
    yield from inner.items() if _kind(space) == "Dict" else enumerate(inner)


def _join(name: str, key: Any) -> str:
    return f"{name}/{key}" if name else str(key)


def _tree(found: dict[str, Any]) -> Any:
    return found[""] if list(found) == [""] else found


def _rows(values: Any, start: NDArray[np.int64] | None, spec: ArraySpec, count: int) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.ascontiguousarray(values, spec.dtype).reshape(count, *spec.shape)
    except (TypeError, ValueError) as error:
        raise EnvFailed(f"observation: expected {spec}, as observation_space has it: {error}") from error
    return array if start is None else array - start.astype(spec.dtype)


def _label(name: str) -> str:
    return f"observation {name}" if name else "observation"


def _faults(label: str, leaf: NDArray[Any], start: NDArray[np.int64] | None, spec: ArraySpec) -> Iterator[str]:
    """Yield how a leaf differs from its spec. An array of the same size in another shape is the same leaf."""
    seen = f"{leaf.dtype}{list(leaf.shape)}"
    if leaf.dtype.kind not in "biuf" or leaf.size != math.prod(spec.shape):
        yield f"{label}: expected {spec}, as observation_space has it, saw {seen}"
        return
    if not np.isfinite(leaf).all():
        yield f"{label}: expected finite numbers, saw {leaf[~np.isfinite(leaf)][0]}"
        return
    if np.dtype(spec.dtype).kind != "f":
        with np.errstate(invalid="ignore"):
            lost = leaf != leaf.astype(spec.dtype)
        if lost.any():
            yield f"{label}: expected {spec}, as observation_space has it, saw {leaf[lost][0]}, which that cannot hold"
            return
    counted = leaf if start is None else leaf - start.astype(leaf.dtype)
    outside = (counted < 0) | (counted >= spec.values)
    if spec.values and outside.any():
        lowest = 0 if start is None else int(np.min(start))
        yield f"{label}: expected categories from {lowest} to {lowest + spec.values - 1}, saw {leaf[outside][0]}"


def _taken(action: Any, place: LeafPath) -> Any:
    """Return an action as the space has it: within bounds despite rounding, categories counted from its start."""
    space, start = place.space, place.start
    taken = action.astype(space.dtype)
    if _kind(space) == "Box":
        taken = np.clip(taken, space.low, space.high)
    return taken if start is None else taken + start.astype(space.dtype)


def _array(space: Any) -> ArraySpec:
    if isinstance(space, CategoricalSpec | ContinuousSpec):
        values = max(space.sizes) if isinstance(space, CategoricalSpec) else 0
        return ArraySpec(tuple(space.shape), space.dtype, values)
    kind = _kind(space)
    name = np.dtype(space.dtype).name if getattr(space, "dtype", None) is not None else "no type"
    name = WIDER.get(name, name)
    if kind not in ("ArraySpec", "Box", *INTEGERS) or name not in DTYPES:
        raise ConfigError(f"{kind} of {name} is none of {SUPPORTED}, of {', '.join(DTYPES)}")
    return ArraySpec(tuple(int(size) for size in space.shape), name, _categories(space, kind))


def _categories(space: Any, kind: str) -> int:
    """Return how many values an entry can have; 0 for numbers that are not categories."""
    if kind == "ArraySpec":
        return int(space.values)
    return int(space.n) if kind == "Discrete" else int(np.max(space.nvec)) if kind == "MultiDiscrete" else 0


def _action(space: Any) -> ActionSpec:
    if isinstance(space, CategoricalSpec | ContinuousSpec):
        return space
    kind, shape = _kind(space), tuple(int(size) for size in getattr(space, "shape", None) or ())
    if kind == "Discrete":
        return CategoricalSpec((int(space.n),))
    if kind == "MultiDiscrete":
        return CategoricalSpec(tuple(int(size) for size in np.ravel(space.nvec)), shape)
    if kind == "MultiBinary":
        return CategoricalSpec((2,) * math.prod(shape), shape)
    if kind == "Box" and np.dtype(space.dtype).kind == "f":
        low, high = (tuple(float(bound) for bound in np.ravel(each)) for each in (space.low, space.high))
        return ContinuousSpec(low, high, shape)
    raise ConfigError(
        f"actions of {kind} of {getattr(space, 'dtype', 'no type')} are none of {SUPPORTED}, numbers being floats"
    )
