"""msgpack messages with numpy arrays, as OpenPI's clients send them. Knows nothing of WebSockets or sessions.

An array is {b"__ndarray__": true, b"data": bytes, b"dtype": "<f4", b"shape": [2, 3]}, a numpy scalar
{b"__npgeneric__": true, b"data": 1.5, b"dtype": "<f4"}. Reading trusts no peer: types and lengths are checked before an
array is made, nothing is unpickled, and an array of objects cannot be expressed.
"""

import math
import re
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from seedrl.errors import InvalidMessage
from seedrl.specs import ArraySpec, EnvSpec, names

OBSERVATION = "observation"  # the key of a plain observation; those of a dict are the names of its leaves
ARRAY, SCALAR, DATA, DTYPE, SHAPE = b"__ndarray__", b"__npgeneric__", b"data", b"dtype", b"shape"
MAX_KEYS = 1024  # of a map
MAX_TEXT = 65536  # bytes of a text, such as a prompt
MAX_RANK = 32
WIDEST = 9  # bytes that msgpack takes for one number
OTHER_BYTES = 65536  # of a message, besides the numbers of an observation
NUMBERS = re.compile(r"[<>=|]?[biuf][1248]")  # the types that an array may have

Tree = Any  # maps, lists, numbers, texts and arrays


def longest_message(spec: EnvSpec) -> int:
    """Return the most bytes that a message with one observation takes, whatever types its numbers are sent in."""
    entries = sum(math.prod(leaf.shape) for leaf in spec.observations)
    return WIDEST * entries + OTHER_BYTES


def pack(tree: Tree) -> bytes:
    packed: bytes = msgpack.packb(tree, default=_encoded)
    return packed


def unpack(data: bytes) -> dict[Any, Any]:
    """Return a message, which is a map. Raises InvalidMessage for other bytes."""
    limits = {"max_map_len": MAX_KEYS, "max_str_len": MAX_TEXT, "max_bin_len": len(data), "max_array_len": len(data)}
    try:
        found = msgpack.unpackb(data, object_hook=_decoded, max_ext_len=0, **limits)
    except InvalidMessage:
        raise
    except Exception as error:  # msgpack's, of many kinds
        raise InvalidMessage(f"message: expected msgpack, saw other bytes ({error!r})") from error
    if not isinstance(found, dict):
        raise InvalidMessage(f"message: expected a map of observations, saw {type(found).__name__}")
    return found


def observation_in(message: dict[Any, Any], spec: EnvSpec) -> list[NDArray[Any]]:
    """Return the leaves of the observation in a message, [1, ...] each. Raises InvalidMessage naming what is wrong."""
    is_plain = not isinstance(spec.observation, dict)
    keys = [OBSERVATION] if is_plain else names(spec.observation)
    missing = [key for key in keys if key not in message]
    if missing:
        seen = ", ".join(sorted(str(key)[:64] for key in message)[:16]) or "none"
        raise InvalidMessage(f"{missing[0]}: expected among the keys {', '.join(keys)}, saw {seen}")
    return [_leaf(key, message[key], leaf)[None] for key, leaf in zip(keys, spec.observations, strict=True)]


def _leaf(key: str, value: Any, spec: ArraySpec) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except ValueError as error:  # lists of different lengths
        raise InvalidMessage(f"{key}: expected {spec}, saw no array") from error
    if array.dtype.kind not in "biuf" or array.shape != spec.shape:
        raise InvalidMessage(f"{key}: expected {spec}, saw {array.dtype}{list(array.shape)}")
    with np.errstate(invalid="ignore", over="ignore"):
        taken = np.ascontiguousarray(array, spec.dtype).reshape(spec.shape)
    if taken.dtype.kind != "f" and not np.array_equal(taken, array):
        raise InvalidMessage(f"{key}: expected {spec}, saw numbers that it cannot hold")
    return taken


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {ARRAY: True, DATA: value.tobytes(), DTYPE: value.dtype.str, SHAPE: value.shape}
    if isinstance(value, np.generic):
        return {SCALAR: True, DATA: value.item(), DTYPE: value.dtype.str}
    raise TypeError(f"{type(value).__name__} cannot be packed")


def _decoded(found: dict[Any, Any]) -> Any:
    if ARRAY in found:
        return _array(found)
    return _scalar(found) if SCALAR in found else found


def _array(found: dict[Any, Any]) -> NDArray[Any]:
    data, dtype, shape = found.get(DATA), _dtype(found), _shape(found)
    size = math.prod(shape) * dtype.itemsize
    if not isinstance(data, bytes) or len(data) != size:
        seen = f"{len(data)}" if isinstance(data, bytes) else type(data).__name__
        raise InvalidMessage(f"data: expected {size} bytes of {dtype}{shape}, saw {seen}")
    return np.frombuffer(data, dtype).reshape(shape)


def _shape(found: dict[Any, Any]) -> list[int]:
    shape = found.get(SHAPE)
    is_short = isinstance(shape, list) and len(shape) <= MAX_RANK
    if not is_short or not all(type(size) is int and size >= 0 for size in shape or ()):
        raise InvalidMessage(f"shape: expected at most {MAX_RANK} sizes, saw {str(shape)[:64]}")
    return list(shape or ())


def _scalar(found: dict[Any, Any]) -> np.generic:
    value = found.get(DATA)
    if not isinstance(value, bool | int | float):
        raise InvalidMessage(f"data: expected a number, saw {type(value).__name__}")
    try:
        scalar: np.generic = _dtype(found).type(value)
        return scalar
    except OverflowError as error:
        raise InvalidMessage(f"data: expected a number of {_dtype(found)}, saw {value}") from error


def _dtype(found: dict[Any, Any]) -> np.dtype[Any]:
    name = found.get(DTYPE)
    if not isinstance(name, str) or not NUMBERS.fullmatch(name):
        raise InvalidMessage(f"dtype: expected a number type such as <f4, saw {str(name)[:64]}")
    try:
        return np.dtype(name)
    except TypeError as error:  # such as i3
        raise InvalidMessage(f"dtype: expected a number type such as <f4, saw {name}") from error
