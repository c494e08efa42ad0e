"""Step messages in protobuf's wire format, by hand: one copy to write, none to read. Knows field numbers, not meanings.

The observations of 64 Atari games are half a megabyte. The generated code copies them into a message and again into
bytes; `serialize` joins the parts once. The generated code copies them out of bytes into a message and again for every
read of the field; `parse` leaves them where gRPC put them and points there. `serialize` writes the same bytes as the
generated code, which reads every message that is not a plain Step (tests/test_framing.py).

The generated code takes a hundred times the memory of a message that has many empty parts, and seconds for it. So a
plain Step has a bounded number of parts, and every other message a bounded size, before anything is made of it.
"""

from typing import Any

from google.protobuf.message import DecodeError

from seedrl.errors import InvalidMessage
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire.messages import StepParts

VARINT, BYTES = 0, 2  # wire types
MAX_LEAVES = 64  # of an observation, and of an action
MAX_BYTES = 16 * 1024  # of a message that is neither a plain Step nor Ready
MAX_READY_BYTES = 320 * 1024  # 64 leaves with names, and the bounds of as many numbers as a policy may have


def _tag(message: Any, field: str, wire_type: int) -> int:
    number: int = message.DESCRIPTOR.fields_by_name[field].number
    return number << 3 | wire_type


STEP = _tag(pb.StreamRequest, "step", BYTES)
READY = _tag(pb.StreamRequest, "ready", BYTES)
NUMBERS = {_tag(pb.Step, name, VARINT): name for name in ("request_id", "buffer")}
BLOBS = {_tag(pb.Step, name, BYTES): name for name in ("env_id", "observation", "reward", "flags")}
OBSERVATION = _tag(pb.Step, "observation", BYTES)  # one of each leaf
FIELDS = sorted({**NUMBERS, **BLOBS}.items())  # the order in which they are written


def serialize(message: pb.StreamRequest | StepParts) -> bytes:
    """Return the bytes of a message of the actor."""
    if not isinstance(message, StepParts):
        return message.SerializeToString()
    body: list[Any] = []
    for tag, name in FIELDS:
        value = getattr(message, name)
        if tag in NUMBERS:
            body += [_varint(tag), _varint(value)] if value else []
            continue
        for part in value if tag == OBSERVATION else (value,):
            if len(blob := memoryview(part).cast("B")):
                body += [_varint(tag), _varint(len(blob)), blob]
    size = sum(map(len, body))
    return b"".join([_varint(STEP), _varint(size), *body])


def parse(data: bytes) -> pb.StreamRequest | StepParts:
    """Return a message of the actor; a Step always as its parts. Raises InvalidMessage for other or too many bytes."""
    parts = _plain_step(data)
    if parts is not None:
        return parts
    limit = MAX_READY_BYTES if data[:1] == bytes([READY]) else MAX_BYTES
    if len(data) > limit:
        raise InvalidMessage(
            f"message: expected at most {limit} bytes unless it is a Step with every field once, saw {len(data)}"
        )
    try:
        message = pb.StreamRequest.FromString(data)
    except DecodeError as error:
        raise InvalidMessage("message: expected a StreamRequest, saw other bytes") from error
    if message.WhichOneof("message") != "step":
        return message
    step = message.step
    return StepParts(step.request_id, step.env_id, tuple(step.observation), step.reward, step.flags, step.buffer)


def _plain_step(data: bytes) -> StepParts | None:
    """Return the parts of a Step that has every field but observations at most once; None for any other message."""
    try:
        tag, at = _read_varint(data, 0)
        size, at = _read_varint(data, at)
        if tag != STEP or at + size != len(data):
            return None
        view = memoryview(data)
        fields: dict[str, Any] = {}
        observation: list[memoryview] = []
        while at < len(data):
            tag, at = _read_varint(data, at)
            value, at = _read_varint(data, at)
            if tag in NUMBERS and NUMBERS[tag] not in fields and value < 1 << (32 if NUMBERS[tag] == "buffer" else 64):
                fields[NUMBERS[tag]] = value
            elif tag in BLOBS and BLOBS[tag] not in fields and at + value <= len(data):
                blob = view[at : at + value]
                at += value
                if tag == OBSERVATION:
                    if len(observation) == MAX_LEAVES:
                        raise InvalidMessage(f"observation: expected at most {MAX_LEAVES} blobs, saw more")
                    observation.append(blob)
                else:
                    fields[BLOBS[tag]] = blob
            else:
                return None
    except IndexError:  # the bytes end in the middle of a number
        return None
    return StepParts(**{"request_id": 0, "env_id": b"", "reward": b"", "flags": b"", **fields}, observation=observation)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError
