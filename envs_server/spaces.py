"""Spaces as Gymnasium defines them, by whomever: what they are called in specs, and values to and fro.

Knows them by the names of their classes, so neither gymnasium nor envpool is needed here.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from seedrl.errors import ConfigError
from seedrl.specs import DTYPES, ActionSpec, Arrays, ArraySpec, ChoiceSpec, EnvSpec, NumberSpec

INTEGERS = ("Discrete", "MultiDiscrete", "MultiBinary")
SUPPORTED = "Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of these"


def spec_of(observation: Any, action: Any, env: str) -> EnvSpec:
    """What an environment with these spaces is like. Raises ConfigError for those that cannot be streamed."""
    try:
        return EnvSpec(
            _tree(observation, {name: _array(space) for name, space in _leaves(observation)}),
            _tree(action, {name: _action(space) for name, space in _leaves(action)}),
        )
    except ConfigError as error:
        raise ConfigError(f"{env} has observations of {observation} and actions of {action}: {error}") from None


def observed(value: Any, space: Any, rows: int) -> Arrays:
    """Observations of many environments, nested as their space, as a tree of contiguous arrays [rows, ...]."""
    arrays: Arrays = _tree(space, {name: _rows(_at(value, path), leaf, rows) for name, path, leaf in _paths(space)})
    return arrays


def chosen(action: Arrays, space: Any) -> Any:
    """A tree of actions [rows, ...], nested as their space wants them, of its types."""
    if not _is_nested(space):
        assert not isinstance(action, dict)
        start = np.asarray(getattr(space, "start", 0), space.dtype)
        return action.astype(space.dtype, copy=False) + (start if start.any() else 0)
    assert isinstance(action, dict)
    return _nested({name: chosen(action[name], leaf) for name, leaf in _leaves(space)}, space)


def _nested(values: dict[str, Any], space: Any, prefix: str = "") -> Any:
    if not _is_nested(space):
        return values[prefix]
    below = {key: _nested(values, each, _join(prefix, key)) for key, each in _children(space)}
    return below if _kind(space) == "Dict" else tuple(below.values())


def _kind(space: Any) -> str:
    names = {each.__name__ for each in type(space).__mro__}
    return next((kind for kind in ("Dict", "Tuple", "Box", *INTEGERS) if kind in names), type(space).__name__)


def _is_nested(space: Any) -> bool:
    return _kind(space) in ("Dict", "Tuple")


def _children(space: Any) -> Iterator[tuple[str, Any]]:
    if _kind(space) == "Dict":
        yield from space.spaces.items()
    else:
        yield from ((str(number), each) for number, each in enumerate(space.spaces))


def _paths(space: Any, name: str = "", path: tuple[Any, ...] = ()) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Name, keys and space of every leaf."""
    if not _is_nested(space):
        yield name, path, space
        return
    for key, each in _children(space):
        yield from _paths(each, _join(name, key), (*path, key if _kind(space) == "Dict" else int(key)))


def _leaves(space: Any) -> Iterator[tuple[str, Any]]:
    yield from ((name, leaf) for name, _, leaf in _paths(space))


def _join(prefix: str, key: str) -> str:
    return f"{prefix}/{key}" if prefix else key


def _tree(space: Any, found: dict[str, Any]) -> Any:
    """In the order of names, as seedrl.specs has it."""
    return dict(sorted(found.items())) if _is_nested(space) else found[""]


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = getattr(value, key) if isinstance(key, str) and hasattr(value, "_fields") else value[key]
    return value


def _rows(value: Any, space: Any, rows: int) -> Any:
    """Categories count from zero."""
    array = np.ascontiguousarray(value, space.dtype).reshape(rows, *space.shape)
    start = np.asarray(getattr(space, "start", 0), space.dtype)
    return array - start if start.any() else array


def _array(space: Any) -> ArraySpec:
    kind = _kind(space)
    if kind not in ("Box", *INTEGERS) or space.dtype is None or np.dtype(space.dtype).name not in DTYPES:
        raise ConfigError(f"{kind} of {getattr(space, 'dtype', None)} is none of {SUPPORTED}")
    values = {"Discrete": lambda: int(space.n), "MultiDiscrete": lambda: int(np.max(space.nvec))}.get(kind, lambda: 0)()
    return ArraySpec(tuple(int(size) for size in space.shape), np.dtype(space.dtype).name, values)


def _action(space: Any) -> ActionSpec:
    kind, shape = _kind(space), tuple(int(size) for size in space.shape or ())
    if kind == "Discrete":
        return ChoiceSpec((int(space.n),))
    if kind == "MultiDiscrete":
        return ChoiceSpec(tuple(int(size) for size in np.ravel(space.nvec)), shape)
    if kind == "MultiBinary":
        return ChoiceSpec((2,) * math.prod(shape), shape)
    if kind == "Box" and np.dtype(space.dtype).kind == "f":
        low, high = (tuple(float(bound) for bound in np.ravel(each)) for each in (space.low, space.high))
        return NumberSpec(low, high, shape)
    raise ConfigError(f"actions of {kind} of {space.dtype} are none of {SUPPORTED}, numbers being floats")
