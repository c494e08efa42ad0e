"""Messages as records ⇄ bytes, and rows ⇄ the blobs of Step and Act. Knows nothing of sessions, gRPC or torch.

The only builder and the only reader of stream messages. Reading trusts no peer: every length, id and number is checked
before it is used, once per message.
"""

import json
import math
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from seedrl.errors import InvalidMessage, Mismatch, NotGranted
from seedrl.rows import KNOWN_FLAGS, Rows
from seedrl.specs import Arrays, ArraySpec, EnvSpec, as_tree, leaves
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire import framing
from seedrl.wire.layout import shared_bytes, shared_leaves
from seedrl.wire.memory import SharedBuffers
from seedrl.wire.messages import (
    PROTOCOL_VERSION,
    Act,
    ActorMessage,
    Command,
    Control,
    Hello,
    LearnerMessage,
    Memory,
    Ready,
    Report,
    StepParts,
    Welcome,
)
from seedrl.wire.spaces import MAX_NAME, decode_spaces, encode_spaces
from seedrl.wire.text import decode_options, printable

ENV_ID = np.dtype("<i4")
UNSIGNED = np.dtype("<u4")
REWARD = np.dtype("<f4")
FLAGS = np.dtype("u1")

UNBOUNDED_TYPES = "efdilqILQ"  # of leaves whose numbers may be absurd; integers of 8 and 16 bits are small anyway

LARGEST = sys.float_info.max

MAX_ADDRESS = 256
MAX_INSTANCE = 64
MAX_HOST = 128
MAX_REASON = 512
# The addresses that a redirect may name. A word that gRPC takes for a scheme, which may name a resolver or a proxy, is
# not a host.
SCHEMES = "dns|ipv4|ipv6|unix|unix-abstract|vsock|xds|google-c2p|google-c2p-experimental"
ADDRESS = re.compile(
    rf"(\[[0-9a-fA-F:.]+\]|(?!({SCHEMES}):)[A-Za-z0-9._-]+):[0-9]{{1,5}}|unix:/[^\s?#%]+", re.IGNORECASE
)


class Bounds(NamedTuple):
    """The largest absolute values that a learner takes, and the settings that say so."""

    observation: float = math.inf  # serving.max_observation
    reward: float = math.inf  # serving.max_reward


UNBOUNDED = Bounds()


# Whole messages.


def serialize_request(message: ActorMessage) -> bytes:
    """Return the bytes of a message of the actor."""
    if isinstance(message, StepParts):
        return framing.serialize(message)
    if isinstance(message, Report):
        return encode_report(message).SerializeToString()
    request = encode_ready(message.spec) if isinstance(message, Ready) else encode_hello(message)
    return request.SerializeToString()


def parse_request(data: bytes) -> ActorMessage:
    """Return a message of the actor. Raises InvalidMessage or Mismatch naming what is wrong."""
    message = framing.parse(data)
    if isinstance(message, StepParts):
        return message
    kind = message.WhichOneof("message")
    if kind == "report":
        return decode_report(message.report)
    if kind == "hello":
        return decode_hello(message.hello)
    if kind == "ready":
        return Ready(decode_spaces(message.ready))
    raise InvalidMessage("message: expected hello, ready, step or report, saw none of them")


def serialize_response(message: LearnerMessage) -> bytes:
    """Return the bytes of a message of the learner."""
    return encode_response(message).SerializeToString()


def encode_response(message: LearnerMessage) -> pb.StreamResponse:
    if isinstance(message, Act):
        return pb.StreamResponse(act=pb.Act(request_id=message.request_id, action=message.action))
    if isinstance(message, Control):
        return pb.StreamResponse(control=pb.Control(**message._asdict()))
    return encode_welcome(message) if isinstance(message, Welcome) else encode_memory(message)


def parse_response(data: bytes) -> LearnerMessage | None:
    """Return a message of the learner; None for one of a kind that is not known. Raises InvalidMessage or Mismatch."""
    try:
        message = pb.StreamResponse.FromString(data)
    except DecodeError as error:
        raise InvalidMessage("message: expected a StreamResponse, saw other bytes") from error
    kind = message.WhichOneof("message")
    if kind == "act":
        return Act(list(message.act.request_id), list(message.act.action))
    if kind == "control":
        return decode_control(message.control)
    if kind == "welcome":
        return decode_welcome(message.welcome)
    return decode_memory(message.memory) if kind == "memory" else None


# Their fields.


def encode_hello(hello: Hello) -> pb.StreamRequest:
    return pb.StreamRequest(
        hello=pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            actor_name=hello.name[:MAX_NAME],
            host=hello.host,
            instance=hello.instance,
            epoch=hello.epoch,
            env_failure=hello.env_failure[:MAX_REASON],
            redirects=hello.redirects,
        )
    )


def decode_hello(hello: pb.Hello) -> Hello:
    """Return the record. Texts for people are shortened and made printable: they end up in logs and terminals."""
    _expect_version(hello.protocol_version, us="this learner", them="the actor")
    for field, limit in (("instance", MAX_INSTANCE), ("host", MAX_HOST)):
        if len(getattr(hello, field)) > limit:
            raise InvalidMessage(f"{field}: expected at most {limit} characters, saw {len(getattr(hello, field))}")
    return Hello(
        name=printable(hello.actor_name, MAX_NAME),
        host=hello.host,
        instance=hello.instance,
        epoch=hello.epoch,
        env_failure=printable(hello.env_failure, MAX_REASON),
        redirects=hello.redirects,
    )


def encode_welcome(job: Welcome) -> pb.StreamResponse:
    env = pb.Env(
        id=job.env_id,
        options_json=json.dumps(job.options),
        processes=job.processes,
        wrappers=job.wrappers,
        players=job.players,
    )
    return pb.StreamResponse(
        welcome=pb.Welcome(
            protocol_version=PROTOCOL_VERSION,
            session_id=job.session_id,
            env=env,
            num_envs=job.num_envs,
            group_size=job.group_size,
            seed=job.seed,
        )
    )


def decode_welcome(welcome: pb.Welcome) -> Welcome:
    _expect_version(welcome.protocol_version, us="this actor", them="the learner")
    options = decode_options("env.options_json", welcome.env.options_json)
    if welcome.num_envs < 1:
        raise InvalidMessage(f"num_envs: expected at least 1, saw {welcome.num_envs}")
    if welcome.group_size < 1 or welcome.num_envs % welcome.group_size:
        raise InvalidMessage(f"group_size: expected a divisor of {welcome.num_envs}, saw {welcome.group_size}")
    players = welcome.env.players or 1
    if welcome.group_size % players:
        raise InvalidMessage(f"env.players: expected a divisor of group_size={welcome.group_size}, saw {players}")
    return Welcome(
        session_id=welcome.session_id,
        env_id=welcome.env.id,
        options=options,
        num_envs=welcome.num_envs,
        group_size=welcome.group_size,
        seed=welcome.seed,
        processes=welcome.env.processes,
        wrappers=tuple(welcome.env.wrappers),
        players=players,
    )


def encode_ready(spec: EnvSpec) -> pb.StreamRequest:
    return pb.StreamRequest(ready=encode_spaces(spec))


def encode_memory(offer: Memory) -> pb.StreamResponse:
    return pb.StreamResponse(memory=pb.Memory(**offer._asdict()))


def decode_memory(memory: pb.Memory) -> Memory:
    return Memory(memory.path, memory.token, memory.buffers, memory.buffer_bytes)


def decode_control(control: pb.Control) -> Control:
    """Return the command; a REDIRECT needs an address. Whether the actor may go there is for the actor to decide."""
    command, address = int(control.command), control.address
    is_address = len(address) <= MAX_ADDRESS and ADDRESS.fullmatch(address)
    if command == Command.REDIRECT and not is_address:
        raise InvalidMessage(f"address: expected HOST:PORT or unix:PATH, saw {address[:64]!r}")
    return Control(Command(command) if command in list(Command) else Command.UNSPECIFIED, control.reason, address)


def encode_report(measured: Report) -> pb.StreamRequest:
    return pb.StreamRequest(report=pb.Report(**measured._asdict()))


def decode_report(report: pb.Report) -> Report:
    measured = Report(*(getattr(report, name) for name in Report._fields))
    for name, value in measured._asdict().items():
        if not (math.isfinite(value) and value >= 0):
            raise InvalidMessage(f"{name}: expected a number that is not negative, saw {value}")
    return measured


def _expect_version(seen: int, us: str, them: str) -> None:
    if seen != PROTOCOL_VERSION:
        raise Mismatch(f"protocol_version: {us} has {PROTOCOL_VERSION}, {them} {seen}; install the same seedrl on both")


# Rows.


def encode_step(request_id: int, rows: Rows, buffer: int = 0) -> StepParts:
    """Return a Step. Its observations are left out if they are in a shared buffer."""
    return StepParts(
        request_id=request_id,
        env_id=np.ascontiguousarray(rows.env_id, ENV_ID),
        observation=[] if buffer else [np.ascontiguousarray(leaf) for leaf in leaves(rows.observation)],
        reward=np.ascontiguousarray(rows.reward, REWARD),
        flags=np.ascontiguousarray(rows.flags, FLAGS),
        buffer=buffer,
    )


def decode_step(
    step: StepParts, spec: EnvSpec, num_envs: int, memory: SharedBuffers | None = None, bounds: Bounds = UNBOUNDED
) -> Rows:
    """Return the rows of a Step, as views of its blobs. Raises InvalidMessage or NotGranted naming what is wrong."""
    _, env_id, observation, reward, flags, buffer = step
    n = len(flags)
    if not 1 <= n <= num_envs:
        raise InvalidMessage(f"flags: expected 1 to {num_envs} rows, saw {n}")
    if buffer:
        observation = _shared_observation(step, spec, memory, n)
    for field, blob, dtype in (("env_id", env_id, ENV_ID), ("reward", reward, REWARD)):
        if len(blob) != n * dtype.itemsize:
            raise InvalidMessage(f"{field}: expected {n * 4} bytes ({n} rows of {dtype.name}), saw {len(blob)}")
    rows = Rows(
        env_id=np.frombuffer(env_id, ENV_ID),
        observation=_decode_observation(observation, spec, n, bounds.observation),
        reward=np.frombuffer(reward, REWARD),
        flags=np.frombuffer(flags, FLAGS),
    )
    if np.maximum.reduce(np.frombuffer(env_id, UNSIGNED)) >= num_envs:  # negative ids are large unsigned numbers
        wrong = rows.env_id[(rows.env_id < 0) | (rows.env_id >= num_envs)][0]
        raise NotGranted(f"env_id: expected 0 to {num_envs - 1}, saw {wrong}")
    if unknown := bytes(flags).translate(None, delete=KNOWN_FLAGS):
        raise InvalidMessage(f"flags: expected a sum of 1, 2, 4 and 8, saw {max(unknown)}")
    _expect_within("reward", rows.reward, bounds.reward)
    return rows


def _decode_observation(blobs: Sequence[Any], spec: EnvSpec, n: int, bound: float) -> Arrays:
    expected = spec.observations
    if len(blobs) != len(expected):
        raise InvalidMessage(f"observation: expected {len(expected)} blobs, one of each leaf, saw {len(blobs)}")
    found: list[NDArray[Any]] = []
    for blob, leaf in zip(blobs, expected, strict=True):
        size = n * leaf.nbytes
        if len(blob) != size:
            raise InvalidMessage(f"observation: expected {size} bytes ({n} rows of {leaf}), saw {len(blob)}")
        values = np.frombuffer(blob, leaf.dtype).reshape(n, *leaf.shape)
        if not leaf.values and _is_unbounded(leaf):
            _expect_within("observation", values, bound)
        if leaf.values and not 0 <= values.min() <= values.max() < leaf.values:
            wrong = values.min() if values.min() < 0 else values.max()
            raise InvalidMessage(f"observation: expected categories 0 to {leaf.values - 1}, saw {wrong}")
        found.append(values)
    return as_tree(spec.observation, found)


def encode_act(request_id: Sequence[int], action: Arrays) -> Act:
    """Return the Act with the actions of all rows of these Steps, in their order."""
    return Act(request_id, [leaf.tobytes() for leaf in leaves(action)])


def decode_act(act: Act, spec: EnvSpec, rows: int) -> Arrays:
    """Return the actions of all Steps that an Act answers, which have this many rows together."""
    expected = spec.actions
    if len(act.action) != len(expected):
        raise InvalidMessage(f"action: expected {len(expected)} blobs, one of each leaf, saw {len(act.action)}")
    found = []
    for blob, leaf in zip(act.action, expected, strict=True):
        size = rows * 4 * math.prod(leaf.shape)
        if len(blob) != size:
            raise InvalidMessage(f"action: expected {size} bytes ({rows} rows of {leaf.dtype}), saw {len(blob)}")
        found.append(np.frombuffer(blob, leaf.dtype).reshape(rows, *leaf.shape))
    return as_tree(spec.action, found)


def _shared_observation(step: StepParts, spec: EnvSpec, memory: SharedBuffers | None, n: int) -> list[memoryview]:
    """Return the bytes of n rows in the buffer that a Step names."""
    if memory is None or not step.buffer <= memory.count:
        raise InvalidMessage(f"buffer: expected 0 to {memory.count if memory else 0}, saw {step.buffer}")
    if len(step.observation):
        raise InvalidMessage(f"observation: expected nothing beside a buffer, saw {len(step.observation)} blobs")
    size = shared_bytes(spec, n)
    if size > memory.buffer_bytes:
        raise InvalidMessage(
            f"flags: expected rows of {memory.buffer_bytes} bytes in a buffer, saw {n} of {size} bytes"
        )
    found = shared_leaves(memory.bytes(step.buffer, size), spec, n)
    # Bytes that are checked are copied first: the peer could change them after the check.
    return [
        memoryview(blob.tobytes()) if leaf.values or _is_unbounded(leaf) else blob
        for blob, leaf in zip(found, spec.observations, strict=True)
    ]


def _is_unbounded(leaf: ArraySpec) -> bool:
    """Tell whether the numbers of a leaf have to be compared with the bounds."""
    return np.dtype(leaf.dtype).char in UNBOUNDED_TYPES


def _expect_within(field: str, values: NDArray[Any], bound: float) -> None:
    # A sum of squares that is below the square of the bound proves that every number is; only if it is not, and for
    # integers, whose squares overflow, is the slow, exact check needed.
    if values.dtype.kind == "f" and float(np.vdot(values, values)) <= min(bound * bound, LARGEST):
        return
    largest = max(abs(values.max().item()), abs(values.min().item()))  # NaN if one is
    if not math.isfinite(largest):
        row = int(np.argwhere(~np.isfinite(values))[0][0])
        raise InvalidMessage(f"{field}: expected finite numbers, saw NaN or infinity in row {row}")
    if largest > bound:
        row = int(np.argwhere(abs(values.astype(np.float64)) > bound)[0][0])
        raise InvalidMessage(
            f"{field}: expected numbers between -{bound:g} and {bound:g}, saw one of size {largest:g} in row {row}; "
            f"serving.max_{field} on the learner is the limit"
        )
