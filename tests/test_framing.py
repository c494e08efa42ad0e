"""The hand-written wire format of a Step against the generated code: neither can tell who wrote a message."""

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from seedrl.errors import InvalidMessage
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire.framing import parse, serialize
from seedrl.wire.messages import StepParts

blobs = st.binary(max_size=300)
steps = st.builds(
    StepParts,
    request_id=st.integers(0, 2**64 - 1),
    env_id=blobs,
    observation=st.lists(st.one_of(st.binary(min_size=1), st.integers(1, 20_000).map(bytes)), max_size=3),
    reward=blobs,
    flags=blobs,
    buffer=st.integers(0, 2**32 - 1),
)


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


@given(st.binary(max_size=60), steps)
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
