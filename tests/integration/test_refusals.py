"""Streams that break a rule are refused by name, and a good actor of the same learner does not notice.

The tests share one learner whose good actor streams as fast as it can, so they have a file of their own: that actor
takes a processor from every other test of its file.
"""

import functools
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import envs_server.actor
from seedrl.errors import EnvFailed, Refused
from seedrl.rows import RESET, Rows
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire import codec
from seedrl.wire.messages import StepParts
from tests.fakes import make_spec
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.support import (
    NUM_ACTIONS,
    RawActor,
    RunningActor,
    RunningLearner,
    SignedPool,
    ended_together,
    expect_refusal,
    make_rows,
    step_message,
    tiny_config,
)
from tests.integration.waiting import DEADLINE, eventually, free_address

SERVICE = "seedrl.v1.InferenceService"
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLearner]:
    """A learner with a good actor that steps without end."""
    config = tiny_config(str(tmp_path_factory.mktemp("busy") / "run"), free_address())
    with ended_together() as started:
        started.append(learner := RunningLearner(config))
        actor = RunningActor(envs_server.actor.ActorConfig(learner=learner.opened().address, name="good"), SignedPool)
        started.append(actor)
        learner.steps_on()
        yield learner
        assert len(actor.pools) == 1
        assert not actor.wrong


def hello(version: int) -> pb.StreamRequest:
    return pb.StreamRequest(hello=pb.Hello(protocol_version=version, actor_name="bad"))


@pytest.mark.parametrize(
    ("message", "code", "words"),
    [
        (hello(2), Code.FAILED_PRECONDITION, ["protocol_version", "has 3", "the actor 2"]),
        (step_message(), Code.INVALID_ARGUMENT, ["expected hello", "saw step"]),
        (pb.StreamRequest(), Code.INVALID_ARGUMENT, ["expected hello", "saw none"]),
    ],
    ids=["version", "no_hello", "empty"],
)
def test_stream_begun_wrongly_is_refused_by_name(
    busy: RunningLearner, message: pb.StreamRequest, code: Code, words: list[str]
) -> None:
    """B2, B6. tests/test_protocol.py has the other orders of messages."""
    with RawActor(busy.address) as raw:
        raw.send(message)
        expect_refusal(raw, code, words)
    busy.steps_on()


@pytest.mark.parametrize(
    ("ready", "code", "words"),
    [
        (codec.encode_ready(make_spec((4,))), Code.FAILED_PRECONDITION, ["spaces", "float32[3]", "float32[4]"]),
        (
            codec.encode_ready(make_spec((3,), "uint8", NUM_ACTIONS)),
            Code.FAILED_PRECONDITION,
            ["spaces", "float32[3]", "uint8[3]"],
        ),
        (codec.encode_ready(make_spec((3,), num_actions=4)), Code.FAILED_PRECONDITION, ["spaces", "17 actions", "4"]),
        (codec.encode_ready(make_spec((3,), "complex64")), Code.INVALID_ARGUMENT, ["observation.dtype", "complex64"]),
        (codec.encode_ready(make_spec((0,))), Code.INVALID_ARGUMENT, ["observation.shape", "[0]"]),
        (codec.encode_ready(make_spec((3,), num_actions=1)), Code.INVALID_ARGUMENT, ["action.choices", "saw [1]"]),
        (
            codec.encode_ready(make_spec((2**31, 2**31), "float64")),
            Code.FAILED_PRECONDITION,
            ["raise actors.groups", "67108864"],
        ),
    ],
    ids=["shape", "dtype", "actions", "unknown_dtype", "empty_shape", "one_action", "huge"],
)
def test_ready_with_wrong_spaces_is_refused_by_name(
    busy: RunningLearner, ready: pb.StreamRequest, code: Code, words: list[str]
) -> None:
    """B2, B6: both sides are named."""
    with RawActor(busy.address) as raw:
        raw.hello()
        raw.send(ready)
        expect_refusal(raw, code, words)
    busy.steps_on()


def rows_with(**changes: Any) -> StepParts:
    """A valid first Step with some of its bytes replaced."""
    return step_message()._replace(**changes)


def poisoned(value: float) -> Any:
    observation = make_rows().observation
    observation[2, 1] = value
    return observation


@pytest.mark.parametrize(
    ("step", "code", "words"),
    [
        (rows_with(observation=[b"123"]), Code.INVALID_ARGUMENT, ["observation", "48 bytes", "float32[3]", "saw 3"]),
        (rows_with(reward=b""), Code.INVALID_ARGUMENT, ["reward", "16 bytes", "saw 0"]),
        (rows_with(env_id=bytes(12)), Code.INVALID_ARGUMENT, ["env_id", "16 bytes", "saw 12"]),
        (rows_with(flags=b""), Code.INVALID_ARGUMENT, ["flags", "1 to 4 rows", "saw 0"]),
        (codec.encode_step(1, make_rows(range(5))), Code.INVALID_ARGUMENT, ["flags", "1 to 4 rows", "saw 5"]),
        (step_message(observation=poisoned(np.nan)), Code.INVALID_ARGUMENT, ["observation", "finite", "row 2"]),
        (step_message(observation=poisoned(np.inf)), Code.INVALID_ARGUMENT, ["observation", "finite", "row 2"]),
        (step_message(reward=np.full(4, np.nan, np.float32)), Code.INVALID_ARGUMENT, ["reward", "finite", "row 0"]),
        (step_message(env_id=np.array([0, 1, 2, 4], np.int32)), Code.PERMISSION_DENIED, ["env_id", "0 to 3", "saw 4"]),
        (step_message(env_id=np.array([0, 1, 2, -1], np.int32)), Code.PERMISSION_DENIED, ["env_id", "saw -1"]),
        (step_message(env_id=np.array([0, 1, 1, 2], np.int32)), Code.INVALID_ARGUMENT, ["env_id", "once", "twice"]),
        (
            step_message(flags=np.full(4, 16, np.uint8)),
            Code.INVALID_ARGUMENT,
            ["flags", "sum of 1, 2, 4 and 8", "saw 16"],
        ),
        (step_message(flags=np.zeros(4, np.uint8)), Code.INVALID_ARGUMENT, ["flags", "expected RESET", "saw 0"]),
    ],
    ids=[
        "observation_bytes",
        "reward_bytes",
        "env_id_bytes",
        "no_rows",
        "too_many_rows",
        "observation_nan",
        "observation_inf",
        "reward_nan",
        "env_id_outside",
        "env_id_negative",
        "env_id_twice",
        "flags_unknown",
        "flags_without_reset",
    ],
)
def test_step_that_breaks_a_rule_is_refused_by_name(
    busy: RunningLearner, step: pb.StreamRequest, code: Code, words: list[str]
) -> None:
    """B2, B7: field, expected, seen; an id outside the grant is PERMISSION_DENIED."""
    with RawActor(busy.address) as raw:
        raw.join()
        raw.send(step)
        expect_refusal(raw, code, words)
    busy.steps_on()


def test_step_for_an_environment_in_flight_is_refused_by_name(start_learner: StartLearner) -> None:
    learner = start_learner(serving__min_rows=5, serving__max_wait=600.0)  # nothing is answered
    with RawActor(learner.address) as raw:
        raw.join()
        raw.step(1, **make_rows([0, 1])._asdict())
        raw.step(2, **make_rows([1, 2])._asdict())
        expect_refusal(raw, Code.INVALID_ARGUMENT, ["env_id", "no row in flight", "saw 1 again"])


def test_message_above_the_limit_ends_its_own_session_only(busy: RunningLearner) -> None:
    with RawActor(busy.address) as raw:
        raw.join()
        raw.send(rows_with(observation=[bytes(65 * 1024 * 1024)]))
        expect_refusal(raw, Code.RESOURCE_EXHAUSTED, ["larger than max"])
    busy.steps_on()


def test_actor_with_other_spaces_gives_up_with_the_learners_words(
    busy: RunningLearner, start_actor: StartActor
) -> None:
    with pytest.raises(Refused, match=r"FAILED_PRECONDITION.*float32\[3\].*float32\[5\]"):
        start_actor(busy.address, functools.partial(SignedPool, shape=(5,))).join()
    busy.steps_on()


def test_half_closed_stream_ends_its_session(busy: RunningLearner) -> None:
    with RawActor(busy.address) as raw:
        session = raw.join().session_id
        eventually(lambda: session in busy.service.inference.sessions.open)
        raw.half_close()
        code, _ = raw.status()
    assert code is Code.OK
    assert session not in busy.service.inference.sessions.open


def test_hello_with_a_name_that_steers_terminals_is_shown_harmless(busy: RunningLearner) -> None:
    with RawActor(busy.address) as raw:
        raw.join(name="\x1b[2J[/red]x")
        names = {session.name for session in busy.service.inference.sessions.open.values()}
        assert "?[2J[/red]x" in names


def test_bytes_that_are_no_message_are_refused_readably_while_others_go_on(busy: RunningLearner) -> None:
    with grpc.insecure_channel(busy.address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Stream")(iter([b"\xff" * 20]), timeout=DEADLINE)
        with pytest.raises(grpc.RpcError):
            next(call)
    assert call.code() is Code.INVALID_ARGUMENT
    assert "expected a StreamRequest" in call.details()
    busy.steps_on()


def test_first_actor_with_spaces_too_large_is_refused_and_the_next_is_served(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner(algorithm__unroll_length=20_000)
    with RawActor(learner.address) as raw:
        raw.join(make_spec((4, 1024, 1024)))
        expect_refusal(raw, Code.FAILED_PRECONDITION, ["MiB are free", "lower serving.max_slots"])
    start_actor(learner.address)
    learner.steps_on()


def test_actor_refused_in_mid_session_blames_its_environments(start_learner: StartLearner) -> None:
    class Poisoned(SignedPool):
        received = 0

        def recv(self) -> Rows:
            rows = super().recv()
            self.received += len(rows.env_id)
            if not (rows.flags & RESET).any() and self.received > 100:  # the first rows are checked by the actor
                rows.reward[0] = np.nan
            return rows

    learner = start_learner()
    actor = envs_server.actor.Actor(learner.address, max_env_failures=0, make_pool=Poisoned)
    with pytest.raises(EnvFailed, match=r"refused what the environments sent.*reward: expected finite"):
        actor.run()
