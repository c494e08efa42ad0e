"""numpy ⇄ protobuf: the only builder and the only reader of stream messages. Knows nothing of sessions or torch.

Reading never trusts a peer: every length, id and number is checked before it is used, once per message.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seedrl.errors import InvalidMessage, Mismatch, NotGranted
from seedrl.plugins import modules_of
from seedrl.rows import RESET, TERMINATED, TRUNCATED, Rows
from seedrl.specs import (
    DTYPES,
    MASK,
    ActionSpec,
    Arrays,
    ArraySpec,
    CategoricalSpec,
    ContinuousSpec,
    EnvSpec,
    as_tree,
    leaves,
    names,
)
from seedrl.status import ActorStatus, Status, Verdict
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire.framing import StepParts
from seedrl.wire.memory import Memory, SharedBuffers

PROTOCOL_VERSION = 3
MAX_REDIRECTS = 3  # in a row: who has followed so many is served or refused

KNOWN_FLAGS = bytes(range(TERMINATED + TRUNCATED + RESET + 1))

ENV_ID = np.dtype("<i4")
UNSIGNED = np.dtype("<u4")
REWARD = np.dtype("<f4")
FLAGS = np.dtype("u1")

MAX_NAME = 128
MAX_ADDRESS = 256
MAX_INSTANCE = 64
MAX_REASON = 512
MAX_RANK = 8
MAX_LEAVES = 64
MAX_CHOICES = 65_536  # of all leaves together
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
# Where a redirect may lead. What gRPC takes for a scheme, which may name a resolver or a proxy, is no host.
SCHEMES = "dns|ipv4|ipv6|unix|unix-abstract|vsock|xds|google-c2p|google-c2p-experimental"
ADDRESS = re.compile(
    rf"(\[[0-9a-fA-F:.]+\]|(?!({SCHEMES}):)[A-Za-z0-9._-]+):[0-9]{{1,5}}|unix:/[^\s?#%]+", re.IGNORECASE
)
ALIGNED = 64  # bytes: where a leaf may begin in shared memory


class Hello(NamedTuple):
    """Who an actor says it is. Explained in the protocol."""

    name: str
    host: str = ""
    instance: str = ""
    epoch: int = 0
    env_failure: str = ""
    redirects: int = 0


class Report(NamedTuple):
    """What an actor has measured since its session began. Explained in the protocol."""

    steps: int = 0
    env_seconds: float = 0.0
    wait_seconds: float = 0.0
    requests: int = 0
    round_trip_seconds: float = 0.0
    cpu_seconds: float = 0.0
    reconnects: int = 0

    def since(self, before: "Report") -> "Report":
        """What was added to an earlier one."""
        return Report._make(now - then for now, then in zip(self, before, strict=True))


class Welcome(NamedTuple):
    """What a Welcome tells an actor to run."""

    session_id: int
    env_id: str
    options: dict[str, Any]
    keep: list[int]
    num_envs: int
    group_size: int
    seed: int
    processes: bool = False
    wrappers: Sequence[str] = ()

    @property
    def modules(self) -> list[str]:
        """Python modules that it asks to import."""
        return modules_of(self.env_id, self.wrappers)


def encode_hello(greeting: Hello) -> pb.StreamRequest:
    return pb.StreamRequest(
        hello=pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            actor_name=greeting.name,
            host=greeting.host,
            instance=greeting.instance,
            epoch=greeting.epoch,
            env_failure=greeting.env_failure,
            redirects=greeting.redirects,
        )
    )


def decode_hello(hello: pb.Hello) -> Hello:
    """Words for people are shortened and made printable: they end up in logs and terminals."""
    _expect_version(hello.protocol_version, us="this learner", them="the actor")
    if len(hello.instance) > MAX_INSTANCE:
        raise InvalidMessage(f"instance: expected at most {MAX_INSTANCE} characters, saw {len(hello.instance)}")
    return Hello(
        name=_printable(hello.actor_name, MAX_NAME),
        host=hello.host,
        instance=hello.instance,
        epoch=hello.epoch,
        env_failure=_printable(hello.env_failure, MAX_REASON),
        redirects=hello.redirects,
    )


def encode_welcome(job: Welcome) -> pb.StreamResponse:
    env = pb.Env(
        id=job.env_id,
        options_json=json.dumps(job.options),
        keep=job.keep,
        processes=job.processes,
        wrappers=job.wrappers,
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
    options = _decode_options("env.options_json", welcome.env.options_json)
    if welcome.num_envs < 1:
        raise InvalidMessage(f"num_envs: expected at least 1, saw {welcome.num_envs}")
    if welcome.group_size < 1 or welcome.num_envs % welcome.group_size:
        raise InvalidMessage(f"group_size: expected a divisor of {welcome.num_envs}, saw {welcome.group_size}")
    return Welcome(
        session_id=welcome.session_id,
        env_id=welcome.env.id,
        options=options,
        keep=list(welcome.env.keep),
        num_envs=welcome.num_envs,
        group_size=welcome.group_size,
        seed=welcome.seed,
        processes=welcome.env.processes,
        wrappers=tuple(welcome.env.wrappers),
    )


def encode_ready(spec: EnvSpec) -> pb.StreamRequest:
    observation = [
        pb.Array(name=name, shape=leaf.shape, dtype=leaf.dtype, values=leaf.values)
        for name, leaf in zip(names(spec.observation), spec.observations, strict=True)
    ]
    action = [_encode_action(*named) for named in zip(names(spec.action), spec.actions, strict=True)]
    return pb.StreamRequest(ready=pb.Ready(observation=observation, action=action))


def _encode_action(name: str, leaf: ActionSpec) -> pb.Action:
    if isinstance(leaf, CategoricalSpec):
        return pb.Action(name=name, shape=leaf.shape, choices=leaf.sizes)
    return pb.Action(name=name, shape=leaf.shape, low=leaf.low, high=leaf.high)


def decode_ready(ready: pb.Ready) -> EnvSpec:
    spec = EnvSpec(
        _tree("observation", ready.observation, _decode_array),
        _tree("action", ready.action, _decode_action),
    )
    choices = sum(leaf.policy_size for leaf in spec.actions if isinstance(leaf, CategoricalSpec))
    if spec.policy_size > MAX_CHOICES:
        raise InvalidMessage(f"action: expected at most {MAX_CHOICES} choices, saw {spec.policy_size}")
    if spec.mask is not None:
        _expect_mask(spec, choices)
    return spec


def _tree(field: str, messages: Sequence[Any], decode: Any) -> Any:
    """The leaves as a tree: a plain one if there is one without a name."""
    if not 1 <= len(messages) <= MAX_LEAVES:
        raise InvalidMessage(f"{field}: expected 1 to {MAX_LEAVES} leaves, saw {len(messages)}")
    found = [message.name for message in messages]
    if found == [""]:
        return decode(field, messages[0])
    for name in found:
        if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
            raise InvalidMessage(f"{field}.name: expected 1 to {MAX_NAME} printable characters, saw {name[:32]!r}")
    if found != sorted(set(found)):
        raise InvalidMessage(f"{field}.name: expected names in order, each once, saw {' '.join(found)[:256]}")
    return {message.name: decode(field, message) for message in messages}


def _decode_array(field: str, array: pb.Array) -> ArraySpec:
    shape = _decode_shape(field, array.shape)
    if array.dtype not in DTYPES:
        raise InvalidMessage(f"{field}.dtype: expected one of {', '.join(DTYPES)}, saw {array.dtype[:32]!r}")
    if array.values > MAX_CHOICES or (array.values and np.dtype(array.dtype).kind not in "iu"):
        raise InvalidMessage(f"{field}.values: expected at most {MAX_CHOICES}, of integers, saw {array.values}")
    return ArraySpec(shape, array.dtype, array.values)


def _decode_action(field: str, action: pb.Action) -> ActionSpec:
    shape = _decode_shape(field, action.shape)
    count = math.prod(shape)
    if action.choices:
        if len(action.choices) != count or not 2 <= min(action.choices) <= max(action.choices) <= MAX_CHOICES:
            raise InvalidMessage(
                f"{field}.choices: expected {count} of 2 to {MAX_CHOICES}, saw {list(action.choices[:8])}"
            )
        return CategoricalSpec(tuple(action.choices), shape)
    low, high = tuple(action.low), tuple(action.high)
    if not len(low) == len(high) == count or not all(map(float.__lt__, low, high)):
        raise InvalidMessage(
            f"{field}.low, high: expected {count} each, low below high, saw {list(low[:8])} and {list(high[:8])}"
        )
    return ContinuousSpec(low, high, shape)


def _decode_shape(field: str, shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) > MAX_RANK or 0 in shape:
        raise InvalidMessage(f"{field}.shape: expected up to {MAX_RANK} positive sizes, saw {list(shape[:10])}")
    return tuple(shape)


def _expect_mask(spec: EnvSpec, choices: int) -> None:
    """A mask has one entry for each choice, in the order of the leaves of an action."""
    leaf = spec.observation[spec.mask] if isinstance(spec.observation, dict) and spec.mask else None
    if leaf is None or math.prod(leaf.shape) != choices or np.dtype(leaf.dtype).kind not in "biu":
        raise InvalidMessage(f"observation.{MASK}: expected {choices} integers, one for each choice, saw {leaf}")


def encode_memory(offer: Memory) -> pb.StreamResponse:
    return pb.StreamResponse(memory=pb.Memory(**offer._asdict()))


def decode_memory(memory: pb.Memory) -> Memory:
    return Memory(memory.path, memory.token, memory.buffers, memory.buffer_bytes)


def encode_step(request_id: int, rows: Rows, buffer: int = 0) -> StepParts:
    """A Step; its observations are left out if they are in a shared buffer."""
    return StepParts(
        request_id=request_id,
        env_id=np.ascontiguousarray(rows.env_id, ENV_ID),
        observation=[] if buffer else [np.ascontiguousarray(leaf) for leaf in leaves(rows.observation)],
        reward=np.ascontiguousarray(rows.reward, REWARD),
        flags=np.ascontiguousarray(rows.flags, FLAGS),
        buffer=buffer,
    )


def decode_step(step: StepParts, spec: EnvSpec, num_envs: int, memory: SharedBuffers | None = None) -> Rows:
    """The rows of a Step, as views of its blobs. Raises InvalidMessage or NotGranted naming what is wrong."""
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
        observation=_decode_observation(observation, spec, n),
        reward=np.frombuffer(reward, REWARD),
        flags=np.frombuffer(flags, FLAGS),
    )
    if np.maximum.reduce(np.frombuffer(env_id, UNSIGNED)) >= num_envs:  # so negative ids are large ones
        wrong = rows.env_id[(rows.env_id < 0) | (rows.env_id >= num_envs)][0]
        raise NotGranted(f"env_id: expected 0 to {num_envs - 1}, saw {wrong}")
    if unknown := bytes(flags).translate(None, delete=KNOWN_FLAGS):
        raise InvalidMessage(f"flags: expected a sum of 1, 2 and 4, saw {max(unknown)}")
    _expect_finite("reward", rows.reward)
    return rows


def _decode_observation(blobs: Sequence[Any], spec: EnvSpec, n: int) -> Arrays:
    expected = spec.observations
    if len(blobs) != len(expected):
        raise InvalidMessage(f"observation: expected {len(expected)} blobs, one of each leaf, saw {len(blobs)}")
    found: list[NDArray[Any]] = []
    for blob, leaf in zip(blobs, expected, strict=True):
        size = n * leaf.nbytes
        if len(blob) != size:
            raise InvalidMessage(f"observation: expected {size} bytes ({n} rows of {leaf}), saw {len(blob)}")
        values = np.frombuffer(blob, leaf.dtype).reshape(n, *leaf.shape)
        if values.dtype.kind == "f":
            _expect_finite("observation", values)
        if leaf.values and not 0 <= values.min() <= values.max() < leaf.values:
            raise InvalidMessage(f"observation: expected categories below {leaf.values}, saw {values.max()}")
        found.append(values)
    return as_tree(spec.observation, found)


def encode_act(request_ids: Sequence[int], action: Arrays) -> pb.StreamResponse:
    return pb.StreamResponse(act=pb.Act(request_id=request_ids, action=[leaf.tobytes() for leaf in leaves(action)]))


def decode_act(act: pb.Act, spec: EnvSpec, rows: int) -> Arrays:
    """The actions of all Steps it answers, which have so many rows together."""
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


def encode_control(command: pb.Control.Command, reason: str) -> pb.StreamResponse:
    return pb.StreamResponse(control=pb.Control(command=command, reason=reason))


def encode_redirect(address: str, reason: str) -> pb.StreamResponse:
    return pb.StreamResponse(control=pb.Control(command=pb.Control.COMMAND_REDIRECT, reason=reason, address=address))


def decode_redirect(control: pb.Control) -> str:
    """Where to go, if it is an address at all. Whether an actor may go there is its own to say."""
    if len(control.address) > MAX_ADDRESS or not ADDRESS.fullmatch(control.address):
        raise InvalidMessage(f"address: expected HOST:PORT or unix:PATH, saw {control.address[:64]!r}")
    return control.address


class ControlRequest(NamedTuple):
    """What people want of an actor, or of all. Explained in the protocol."""

    actor: str = ""
    temperature: float | None = None
    epsilon: float | None = None
    command: "pb.Control.Command" = pb.Control.COMMAND_UNSPECIFIED
    options: dict[str, Any] | None = None
    open: bool | None = None


ORDERS = {
    "pause": pb.Control.COMMAND_PAUSE,
    "resume": pb.Control.COMMAND_RESUME,
    "reset": pb.Control.COMMAND_RESET,
    "drain": pb.Control.COMMAND_END,
    "move": pb.Control.COMMAND_REDIRECT,
}


def encode_control_request(order: ControlRequest) -> pb.ControlRequest:
    request = pb.ControlRequest(
        actor=order.actor,
        temperature=order.temperature,
        epsilon=order.epsilon,
        command=order.command,
        options_json=json.dumps(order.options) if order.options else "",
    )
    if order.open is not None:
        request.open = order.open
    return request


def decode_control_request(request: pb.ControlRequest) -> ControlRequest:
    temperature = request.temperature if request.HasField("temperature") else None
    epsilon = request.epsilon if request.HasField("epsilon") else None
    if temperature is not None and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise InvalidMessage(f"temperature: expected {MIN_TEMPERATURE} to {MAX_TEMPERATURE}, saw {temperature}")
    if epsilon is not None and not 0 <= epsilon <= 1:
        raise InvalidMessage(f"epsilon: expected 0 to 1, saw {epsilon}")
    if request.command not in (pb.Control.COMMAND_UNSPECIFIED, *ORDERS.values()):
        raise InvalidMessage(f"command: expected one of {', '.join(ORDERS)}, saw {request.command}")
    options = _decode_options("options_json", request.options_json) or None
    is_open = request.open if request.HasField("open") else None
    order = ControlRequest(request.actor, temperature, epsilon, request.command, options, is_open)
    if order == ControlRequest(request.actor):
        raise InvalidMessage("message: expected something to do, saw nothing")
    return order


def describe_request(order: ControlRequest) -> str:
    """An order, for people."""
    names = {command: name for name, command in ORDERS.items()}
    wanted = {
        "temperature": order.temperature,
        "epsilon": order.epsilon,
        "options": _printable(json.dumps(order.options), MAX_REASON) if order.options else None,
    }
    words = [f"{name}={value}" for name, value in wanted.items() if value is not None]
    words += [names[order.command]] if order.command else []
    words += [] if order.open is None else ["open" if order.open else "take no new ones"]
    return ", ".join(words)


def _decode_options(field: str, text: str) -> dict[str, Any]:
    try:
        options = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"{field}: expected JSON, saw {text[:32]!r}") from error
    if not isinstance(options, dict):
        raise InvalidMessage(f"{field}: expected an object, saw {type(options).__name__}")
    return options


def encode_report(measured: Report) -> pb.StreamRequest:
    return pb.StreamRequest(report=pb.Report(**measured._asdict()))


def decode_report(report: pb.Report) -> Report:
    measured = Report(*(getattr(report, name) for name in Report._fields))
    for name, value in measured._asdict().items():
        if not (math.isfinite(value) and value >= 0):
            raise InvalidMessage(f"{name}: expected a number that is not negative, saw {value}")
    return measured


def encode_status(status: Status) -> pb.StatusResponse:
    return pb.StatusResponse(
        state=status.state,
        version=status.version,
        env_id=status.env,
        device=status.device,
        run_dir=status.run_dir,
        address=status.address,
        metrics_address=status.metrics_address,
        goal_env_steps=status.goal_env_steps,
        goal_return=status.goal_return,
        row=status.row,
        verdict=pb.Verdict(**asdict(status.verdict)),
        trouble=status.trouble,
        actors=[pb.ActorStatus(**asdict(actor)) for actor in status.actors],
        rank=status.rank,
        ranks=status.ranks,
        node=status.node,
    )


def decode_status(status: pb.StatusResponse) -> Status:
    return Status(
        state=status.state,
        version=status.version,
        env=status.env_id,
        device=status.device,
        run_dir=status.run_dir,
        address=status.address,
        metrics_address=status.metrics_address,
        goal_env_steps=status.goal_env_steps,
        goal_return=status.goal_return if status.HasField("goal_return") else None,
        row=dict(status.row),
        verdict=Verdict(status.verdict.bottleneck, status.verdict.evidence, status.verdict.change),
        trouble=dict(status.trouble),
        actors=[
            ActorStatus(**{each.name: getattr(actor, each.name) for each in fields(ActorStatus)})
            for actor in status.actors
        ],
        rank=status.rank,
        ranks=status.ranks,
        node=status.node,
    )


def _expect_version(seen: int, us: str, them: str) -> None:
    if seen != PROTOCOL_VERSION:
        raise Mismatch(
            f"protocol_version: {us} speaks {PROTOCOL_VERSION}, {them} {seen}; install the same seedrl on both"
        )


def _printable(text: str, length: int) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:length])


def shared_bytes(spec: EnvSpec, n: int) -> int:
    """That the observations of n rows take in shared memory."""
    *_, last = _places(spec, n)
    return int(last.stop)


def shared_leaves(buffer: memoryview, spec: EnvSpec, n: int) -> list[memoryview]:
    """Where each leaf of n rows is in shared memory."""
    return [buffer[place] for place in _places(spec, n)]


def _places(spec: EnvSpec, n: int) -> list[slice]:
    places, at = [], 0
    for leaf in spec.observations:
        places.append(slice(at, at + n * leaf.nbytes))
        at = -(-places[-1].stop // ALIGNED) * ALIGNED
    return places


def _shared_observation(step: StepParts, spec: EnvSpec, memory: SharedBuffers | None, n: int) -> list[memoryview]:
    """The bytes of n rows in the buffer that a Step names."""
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
    # What is checked is copied first: the peer could change it after the look.
    return [
        memoryview(blob.tobytes()) if leaf.values or np.dtype(leaf.dtype).kind == "f" else blob
        for blob, leaf in zip(found, spec.observations, strict=True)
    ]


def _expect_finite(field: str, values: NDArray[Any]) -> None:
    # A sum of squares is finite unless a number is not, or it overflows; only then is the slow, exact look needed.
    if not math.isfinite(np.vdot(values, values)) and not np.isfinite(values).all():
        row = int(np.argwhere(~np.isfinite(values))[0][0])
        raise InvalidMessage(f"{field}: expected finite numbers, saw NaN or infinity in row {row}")
