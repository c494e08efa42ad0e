"""numpy ⇄ protobuf: the only builder and the only reader of stream messages. Knows nothing of sessions or torch.

Reading never trusts a peer: every length, id and number is checked before it is used, once per message.
"""

import json
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seedrl.errors import InvalidMessage, NotGranted
from seedrl.specs import DTYPES, ArraySpec, EnvSpec
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire.framing import StepParts

PROTOCOL_VERSION = 1

TERMINATED, TRUNCATED, RESET = 1, 2, 4
ENDED = TERMINATED | TRUNCATED

ENV_ID = np.dtype("<i4")
REWARD = np.dtype("<f4")
FLAGS = np.dtype("u1")
ACTION = np.dtype("<i4")

MAX_NAME = 128
MAX_RANK = 8
MAX_ACTIONS = 65_536


class Rows(NamedTuple):
    """The newest step of n environments."""

    env_id: NDArray[np.int32]  # [n]
    observation: NDArray[Any]  # [n, ...]
    reward: NDArray[np.float32]  # [n]
    flags: NDArray[np.uint8]  # [n]  sum of TERMINATED, TRUNCATED, RESET


class Job(NamedTuple):
    """What a Welcome tells an actor to run."""

    session_id: int
    env_id: str
    options: dict[str, Any]
    keep: list[int]
    num_envs: int
    group_size: int
    seed: int


def encode_hello(actor_name: str) -> pb.StreamRequest:
    return pb.StreamRequest(hello=pb.Hello(protocol_version=PROTOCOL_VERSION, actor_name=actor_name))


def encode_welcome(job: Job) -> pb.StreamResponse:
    env = pb.Env(id=job.env_id, options_json=json.dumps(job.options), keep=job.keep)
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


def decode_welcome(welcome: pb.Welcome) -> Job:
    try:
        options = json.loads(welcome.env.options_json or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"env.options_json: expected JSON, saw {welcome.env.options_json[:32]!r}") from error
    if not isinstance(options, dict):
        raise InvalidMessage(f"env.options_json: expected an object, saw {type(options).__name__}")
    if welcome.num_envs < 1:
        raise InvalidMessage(f"num_envs: expected at least 1, saw {welcome.num_envs}")
    if welcome.group_size < 1 or welcome.num_envs % welcome.group_size:
        raise InvalidMessage(f"group_size: expected a divisor of {welcome.num_envs}, saw {welcome.group_size}")
    return Job(
        session_id=welcome.session_id,
        env_id=welcome.env.id,
        options=options,
        keep=list(welcome.env.keep),
        num_envs=welcome.num_envs,
        group_size=welcome.group_size,
        seed=welcome.seed,
    )


def encode_ready(spec: EnvSpec) -> pb.StreamRequest:
    observation = pb.Array(shape=spec.observation.shape, dtype=spec.observation.dtype)
    return pb.StreamRequest(ready=pb.Ready(observation=observation, num_actions=spec.num_actions))


def decode_ready(ready: pb.Ready) -> EnvSpec:
    shape, dtype = tuple(ready.observation.shape), ready.observation.dtype
    if dtype not in DTYPES:
        raise InvalidMessage(f"observation.dtype: expected one of {', '.join(DTYPES)}, saw {dtype[:32]!r}")
    if not 1 <= len(shape) <= MAX_RANK or 0 in shape:
        raise InvalidMessage(f"observation.shape: expected 1 to {MAX_RANK} positive sizes, saw {list(shape[:10])}")
    if not 2 <= ready.num_actions <= MAX_ACTIONS:
        raise InvalidMessage(f"num_actions: expected 2 to {MAX_ACTIONS}, saw {ready.num_actions}")
    return EnvSpec(ArraySpec(shape, dtype), ready.num_actions)


def encode_step(request_id: int, rows: Rows) -> StepParts:
    return StepParts(
        request_id=request_id,
        env_id=np.ascontiguousarray(rows.env_id, ENV_ID),
        observation=np.ascontiguousarray(rows.observation),
        reward=np.ascontiguousarray(rows.reward, REWARD),
        flags=np.ascontiguousarray(rows.flags, FLAGS),
    )


def decode_step(step: StepParts, spec: EnvSpec, num_envs: int) -> Rows:
    """The rows of a Step, as views of its blobs. Raises InvalidMessage or NotGranted naming what is wrong."""
    _, env_id, observation, reward, flags = step
    n = len(flags)
    if not 1 <= n <= num_envs:
        raise InvalidMessage(f"flags: expected 1 to {num_envs} rows, saw {n}")
    _expect_bytes("env_id", env_id, n * ENV_ID.itemsize, f"{n} rows of int32")
    _expect_bytes("reward", reward, n * REWARD.itemsize, f"{n} rows of float32")
    _expect_bytes("observation", observation, n * spec.observation.nbytes, f"{n} rows of {spec.observation}")
    rows = Rows(
        env_id=np.frombuffer(env_id, ENV_ID),
        observation=np.frombuffer(observation, spec.observation.dtype).reshape(n, *spec.observation.shape),
        reward=np.frombuffer(reward, REWARD),
        flags=np.frombuffer(flags, FLAGS),
    )
    if np.maximum.reduce(rows.env_id.view(np.uint32)) >= num_envs:  # as unsigned, negative ids are large ones
        wrong = rows.env_id[(rows.env_id < 0) | (rows.env_id >= num_envs)][0]
        raise NotGranted(f"env_id: expected 0 to {num_envs - 1}, saw {wrong}")
    if (highest := np.maximum.reduce(rows.flags)) > TERMINATED | TRUNCATED | RESET:
        raise InvalidMessage(f"flags: expected a sum of 1, 2 and 4, saw {highest}")
    _expect_finite("reward", rows.reward)
    if rows.observation.dtype.kind == "f":
        _expect_finite("observation", rows.observation)
    return rows


def encode_act(request_id: int, action: NDArray[np.int64]) -> pb.StreamResponse:
    return pb.StreamResponse(act=pb.Act(request_id=request_id, action=action.astype(ACTION, copy=False).tobytes()))


def decode_act(act: pb.Act, rows: int) -> NDArray[np.int32]:
    _expect_bytes("action", act.action, rows * ACTION.itemsize, f"{rows} rows of int32")
    return np.frombuffer(act.action, ACTION)


def encode_control(command: pb.Control.Command, reason: str) -> pb.StreamResponse:
    return pb.StreamResponse(control=pb.Control(command=command, reason=reason))


def encode_report(steps: int, env_seconds: float, wait_seconds: float) -> pb.StreamRequest:
    return pb.StreamRequest(report=pb.Report(steps=steps, env_seconds=env_seconds, wait_seconds=wait_seconds))


def _expect_bytes(field: str, blob: bytes | memoryview, expected: int, meaning: str) -> None:
    if len(blob) != expected:
        raise InvalidMessage(f"{field}: expected {expected} bytes ({meaning}), saw {len(blob)}")


def _expect_finite(field: str, values: NDArray[Any]) -> None:
    # A sum is finite unless a summand is not, or it overflows; only then is the slow, exact look needed.
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.add.reduce(values, axis=None))
    if not math.isfinite(total) and not np.isfinite(values).all():
        row = int(np.argwhere(~np.isfinite(values))[0][0])
        raise InvalidMessage(f"{field}: expected finite numbers, saw NaN or infinity in row {row}")
