"""The hand-written wire format of a Step against the generated code: neither can tell who wrote a message."""

import tracemalloc

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from seedrl.errors import InvalidMessage
from seedrl.specs import ArraySpec, ContinuousSpec, EnvSpec
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire.codec import parse_request, serialize_request
from seedrl.wire.framing import BYTES, MAX_BYTES, MAX_LEAVES, READY, STEP, _tag, _varint, parse, serialize
from seedrl.wire.messages import Ready, StepParts
from seedrl.wire.spaces import MAX_CHOICES, MAX_NAME, MAX_RANK

HELLO, REPORT = (_tag(pb.StreamRequest, name, BYTES) for name in ("hello", "report"))

blobs = st.binary(max_size=300)


def steps_of(longest: int) -> st.SearchStrategy[StepParts]:
    """Steps with up to three observations of up to so many bytes."""
    return st.builds(
        StepParts,
        request_id=st.integers(0, 2**64 - 1),
        env_id=blobs,
        observation=st.lists(st.one_of(st.binary(min_size=1), st.integers(1, longest).map(bytes)), max_size=3),
        reward=blobs,
        flags=blobs,
        buffer=st.integers(0, 2**32 - 1),
    )


steps, short_steps = steps_of(20_000), steps_of(MAX_BYTES // 4)  # longer ones are refused with noise in them


def generated(step: StepParts) -> pb.StreamRequest:
    return pb.StreamRequest(step=pb.Step(**step._asdict()))


def as_bytes(step: StepParts) -> StepParts:
    return StepParts(
        step.request_id,
        bytes(step.env_id),
        [bytes(blob) for blob in step.observation],
        bytes(step.reward),
        bytes(step.flags),
        step.buffer,
    )


@given(steps)
def test_serialize_step_equals_the_generated_code(step: StepParts) -> None:
    assert serialize(step) == generated(step).SerializeToString(deterministic=True)


@given(steps)
def test_parse_step_of_the_generated_code_is_read_whole(step: StepParts) -> None:
    parsed = parse(generated(step).SerializeToString())
    assert isinstance(parsed, StepParts)
    assert as_bytes(parsed) == step


@given(st.binary(max_size=60), short_steps)
def test_parse_anything_agrees_with_the_generated_code(noise: bytes, step: StepParts) -> None:
    """Noise alone, noise inside a Step, noise behind one: the same message or the same refusal."""
    whole = serialize(step)
    for data in (noise, whole + noise, whole[: len(noise)], whole[:3] + noise + whole[3:], b"\x1a" + noise):
        try:
            expected = pb.StreamRequest.FromString(data)
        except DecodeError:
            with pytest.raises(InvalidMessage):
                parse(data)
            continue
        parsed = parse(data)
        if isinstance(parsed, StepParts):  # unknown fields mean nothing and are not kept
            expected = generated(StepParts(*(getattr(expected.step, field) for field in StepParts._fields)))
            parsed = generated(as_bytes(parsed))
        assert parsed == expected


def test_parse_other_messages_are_left_to_the_generated_code() -> None:
    hello = pb.StreamRequest(hello=pb.Hello(protocol_version=1, actor_name="a"))
    assert parse(serialize(hello)) == hello


def message_of(tag: int, parts: bytes) -> bytes:
    """A StreamRequest with one field of this many bytes."""
    return bytes([tag]) + _varint(len(parts)) + parts


EMPTY = b"\x1a\x00"  # an observation of a Step
LEAF = b"\x0a\x00"  # an observation of Ready


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (message_of(STEP, EMPTY * 2**19), "observation: expected at most 64 blobs, saw more"),
        (message_of(STEP, b"\x08\x01\x08\x01" + EMPTY * 2**19), "message: expected at most 16384 bytes"),
        (message_of(STEP, EMPTY) + message_of(STEP, EMPTY * 2**19), "message: expected at most 16384 bytes"),
        (message_of(READY, LEAF * 2**19), "message: expected at most 327680 bytes"),
        (message_of(HELLO, b"\x12" + _varint(2**20) + bytes(2**20)), "message: expected at most 16384 bytes"),
        (message_of(REPORT, b"\x08\x01" * 2**19), "message: expected at most 16384 bytes"),
        (b"\xfa\x7f\x00" * 2**19, "message: expected at most 16384 bytes"),
    ],
    ids=["blobs", "blobs_and_a_field_twice", "two_steps", "ready", "hello", "report", "unknown"],
)
def test_parse_a_mebibyte_of_tiny_parts_is_refused_before_anything_is_made_of_it(data: bytes, words: str) -> None:
    """B1: the generated code takes 100 times as much memory, and Python seconds, for the same bytes."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidMessage, match=f"^{words}"):
            parse(data)
        assert tracemalloc.get_traced_memory()[1] < 2**16
    finally:
        tracemalloc.stop()


def test_parse_the_largest_ready_there_can_be_is_read() -> None:
    """All choices of the largest action, as bounds of numbers, and all leaves with the longest names."""
    names = [f"{number:03}" + "x" * (MAX_NAME - 3) for number in range(MAX_LEAVES)]
    count = MAX_CHOICES // 2 // MAX_LEAVES
    action = ContinuousSpec((-1.0,) * count, (1.0,) * count, (*(1,) * (MAX_RANK - 1), count))
    observation = ArraySpec((2**31,) * MAX_RANK, "float64")
    spec = EnvSpec(dict.fromkeys(names, observation), dict.fromkeys(names, action))
    assert parse_request(serialize_request(Ready(spec))) == Ready(spec)


def test_serialize_arrays_of_any_type_are_taken_as_their_bytes() -> None:
    ids, frames = np.arange(3, dtype=np.int32), np.arange(12, dtype=np.float32).reshape(3, 4)
    step = StepParts(5, ids, [frames], np.zeros(3, np.float32), np.zeros(3, np.uint8))
    parsed = parse(serialize(step))
    assert isinstance(parsed, StepParts)
    np.testing.assert_array_equal(np.frombuffer(parsed.observation[0], np.float32).reshape(3, 4), frames)


def test_parse_step_points_into_the_bytes_it_was_given() -> None:
    data = serialize(StepParts(1, b"1234", [b"observation"], b"1234", b"1"))
    parsed = parse(data)
    assert isinstance(parsed, StepParts)
    assert parsed.observation[0].obj is data
