"""msgpack messages with arrays: equal to OpenPI's own bytes, and hostile ones are refused by name."""

import contextlib
import math
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from seedrl.errors import InvalidMessage
from seedrl.specs import ArraySpec, EnvSpec, discrete
from seedrl.wire.packed import longest_message, observation_in, pack, unpack
from tests.fakes import make_spec

SPEC = make_spec((2, 3))
NESTED = EnvSpec({"camera/left": ArraySpec((2, 2), "uint8"), "state": ArraySpec((3,), "float32")}, discrete(2))


def theirs(value: Any) -> Any:
    """Return an array as openpi_client.msgpack_numpy packs it."""
    return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}


@given(arrays.arrays(st.sampled_from(["<f4", "<f8", "|u1", "<i8", "|b1"]), arrays.array_shapes(min_dims=0)))
def test_arrays_have_the_bytes_of_openpis_and_come_back(value: Any) -> None:
    value = np.asarray(value)
    assert pack({"x": value}) == msgpack.packb({"x": theirs(value)})
    found = unpack(pack({"x": value}))["x"]
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    np.testing.assert_array_equal(found, value)


def test_scalars_come_back_as_their_type() -> None:
    found = unpack(pack({"x": np.float32(1.5), "y": np.uint8(7)}))
    assert (found["x"], found["x"].dtype, found["y"].dtype) == (1.5, np.float32, np.uint8)


@pytest.mark.parametrize("sent", [np.ones((2, 3)), np.ones((2, 3), np.int64), [[1, 1, 1], [1, 1, 1]]])
def test_observation_is_taken_in_any_type_that_its_own_can_hold(sent: Any) -> None:
    [leaf] = observation_in(unpack(pack({"observation": sent, "prompt": "go"})), SPEC)
    assert (leaf.dtype, leaf.shape) == (np.float32, (1, 2, 3))
    assert (leaf == 1).all()


def test_observation_of_a_dict_has_the_names_of_its_leaves() -> None:
    message = {"state": np.arange(3.0), "camera/left": np.full((2, 2), 255)}
    camera, state = observation_in(unpack(pack(message)), NESTED)
    assert (camera.dtype, camera.tolist()) == (np.uint8, [[[255, 255], [255, 255]]])
    assert (state.dtype, state.tolist()) == (np.float32, [[0, 1, 2]])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"state": np.zeros(3)}, "camera/left: expected among the keys camera/left, state, saw state"),
        ({"state": np.zeros(4), "camera/left": np.zeros((2, 2))}, r"state: expected float32\[3\], saw float64\[4\]"),
        ({"state": np.zeros(3), "camera/left": np.full((2, 2), 256)}, "numbers that it cannot hold"),
        ({"state": np.zeros(3), "camera/left": np.full((2, 2), 0.5)}, "numbers that it cannot hold"),
        ({"state": "abc", "camera/left": np.zeros((2, 2))}, "state: expected"),
        ({"state": [[1], [2, 3]], "camera/left": np.zeros((2, 2))}, "state: expected .* saw no array"),
    ],
)
def test_observation_that_does_not_fit_is_refused_by_name(message: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidMessage, match=words):
        observation_in(unpack(pack(message)), NESTED)


ARRAY = theirs(np.zeros(2, np.float32))
HOSTILE: dict[str, Any] = {
    "objects": {**ARRAY, b"dtype": "|O"},
    "structured": {**ARRAY, b"dtype": [["x", "<f4"]]},
    "text": {**ARRAY, b"dtype": "<U4"},
    "odd width": {**ARRAY, b"dtype": "<f1"},
    "too short": {**ARRAY, b"shape": [3]},
    "huge": {**ARRAY, b"shape": [2**40, 2**40]},
    "negative": {**ARRAY, b"shape": [-1, -2]},
    "no shape": {**ARRAY, b"shape": None},
    "a fraction": {**ARRAY, b"shape": [2.0]},
    "ranks": {**ARRAY, b"shape": [1] * 33},
    "no data": {**ARRAY, b"data": "text"},
    "scalar": {b"__npgeneric__": True, b"data": [1], b"dtype": "<f4"},
    "overflow": {b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"},
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_array_that_contradicts_itself_is_refused(value: Any) -> None:
    with pytest.raises(InvalidMessage, match="expected"):
        unpack(msgpack.packb({"observation": value}))


@given(st.binary(max_size=64))
def test_other_bytes_are_refused_or_a_map(data: bytes) -> None:
    with contextlib.suppress(InvalidMessage):
        assert isinstance(unpack(data), dict)


def test_deep_and_wide_messages_are_refused() -> None:
    for data in (
        b"\x91" * 5000 + b"\x01",
        msgpack.packb({str(number): 1 for number in range(2000)}),
        b"\xdf\xff\xff\xff\xff",
    ):
        with pytest.raises(InvalidMessage, match="expected msgpack"):
            unpack(data)


def test_longest_message_has_room_for_the_widest_numbers() -> None:
    rows = [[math.pi] * 3] * 2
    assert len(pack({"observation": rows})) < longest_message(SPEC) < 100_000
