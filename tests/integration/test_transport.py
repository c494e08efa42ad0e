"""The stream in every situation we could think of, over real sockets: nobody hangs, nobody gets a wrong answer."""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import envs_server.actor
import envs_server.session
from seedrl.errors import ConfigError, EnvBroken, EnvFailed, InvalidMessage, LearnerLost, ThreadDied
from seedrl.roles.learner import LearnerProcess
from seedrl.rows import Rows
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire import codec
from seedrl.wire.messages import Command, Control, StepParts, Welcome
from tests.fakes import make_job
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.processes import summary_of
from tests.integration.support import (
    SPEC,
    ActorLeft,
    IdleLearnerService,
    RawActor,
    ScriptedLearner,
    SignedPool,
    Wire,
    expect_refusal,
    make_rows,
    right_action,
)
from tests.integration.waiting import DEADLINE, eventually, free_address, within

SERVICE = "seedrl.v1.InferenceService"
Code = grpc.StatusCode


# Joining.


def test_actor_started_before_the_learner_joins_when_it_comes(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    address = free_address()
    actor = start_actor(address)
    eventually(lambda: actor.says("trying again"))
    start_learner(listen=address).steps_on()
    assert actor.requests > 0


def test_learner_restarted_gets_its_actor_back_as_a_new_session(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    first = start_learner()
    actor = start_actor(first.address)
    first.steps_on()
    before = first.stop()
    second = start_learner(listen=first.address)
    eventually(lambda: second.env_steps > before["env_steps"])
    second.steps_on()
    assert len(actor.pools) == 2
    assert not actor.ended()
    assert not actor.wrong


def test_actor_whose_wire_is_cut_joins_again_as_a_new_session(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner()
    with Wire(learner.address) as wire:
        actor = start_actor(wire.address)
        learner.steps_on()
        wire.cut()
        eventually(lambda: len(actor.pools) == 2 and actor.requests > 0)
        eventually(lambda: len(learner.service.inference.sessions.open) == 1)
        learner.steps_on()
        assert actor.pools[0].signature != actor.pools[1].signature  # other seeds: not the same episodes once more
        actor.stop()


def test_unix_socket_serves_like_tcp(start_learner: StartLearner, start_actor: StartActor, tmp_path: Path) -> None:
    learner = start_learner(listen=f"unix:{tmp_path}/learner.sock")
    actor = start_actor(learner.address)
    learner.steps_on()
    assert not actor.wrong


# Own answers.


@pytest.mark.parametrize("count", [2, 10])
def test_actors_at_once_each_get_their_own_answers(
    start_learner: StartLearner, start_actor: StartActor, count: int
) -> None:
    learner = start_learner(serving__max_slots=4 * count)
    actors = [start_actor(learner.address) for _ in range(count)]
    eventually(lambda: all(actor.requests >= 100 for actor in actors))
    assert [wrong for actor in actors for wrong in actor.wrong] == []
    assert len({actor.pools[0].signature for actor in actors}) == count


def test_replies_out_of_order_reach_their_environments(start_actor: StartActor) -> None:
    def answer_pairs_backwards(requests: Iterator[pb.StreamRequest]) -> Iterator[pb.StreamResponse]:
        yield from begin(requests, num_envs=8, group_size=4)
        for _ in range(20):
            pair = [next_step(requests), next_step(requests)]
            assert pair[0].request_id != pair[1].request_id
            yield from (answer(step) for step in reversed(pair))
        yield codec.encode_response(Control(Command.END, "enough"))

    with ScriptedLearner(answer_pairs_backwards) as learner:
        actor = start_actor(learner.address)
        actor.join()
    assert actor.requests == 40
    assert not actor.wrong


def test_act_for_no_request_in_flight_is_named_by_the_actor(start_actor: StartActor) -> None:
    def invent(requests: Iterator[pb.StreamRequest]) -> Iterator[pb.StreamResponse]:
        yield from begin(requests)
        yield codec.encode_response(codec.encode_act([99], np.zeros(4, np.int32)))

    with ScriptedLearner(invent) as learner, pytest.raises(InvalidMessage, match=r"request_id.*99"):
        start_actor(learner.address).join()


def test_act_with_too_few_rows_is_named_by_the_actor(start_actor: StartActor) -> None:
    def shorten(requests: Iterator[pb.StreamRequest]) -> Iterator[pb.StreamResponse]:
        yield from begin(requests)
        yield codec.encode_response(codec.encode_act([next_step(requests).request_id], np.zeros(3, np.int32)))

    with ScriptedLearner(shorten) as learner, pytest.raises(InvalidMessage, match=r"action: expected 16 bytes.*saw 12"):
        start_actor(learner.address).join()


def test_act_comes_in_the_order_of_the_rows_of_its_step(start_learner: StartLearner) -> None:
    learner = start_learner()
    with RawActor(learner.address) as raw:
        raw.join()
        observation = np.array([[1, 5, 9], [2, 6, 9], [3, 7, 9]], np.float32)
        rows = make_rows(env_id=[3, 0, 2])._replace(observation=observation)
        raw.send(codec.encode_step(77, rows))
        act = raw.receive().act
    assert act.request_id == [77]
    assert codec.decode_act(act, SPEC, 3).tolist() == right_action(observation).tolist()


# Large messages.


def test_messages_of_forty_megabytes_are_served_when_the_spaces_call_for_them(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner(
        serving__max_slots=2, actors__envs=2, actors__groups=1, algorithm__unroll_length=1, algorithm__batch_size=2
    )
    actor = start_actor(learner.address, functools.partial(SignedPool, shape=(5 * 1024 * 1024,)))
    eventually(lambda: actor.requests >= 3)
    assert not actor.wrong


# Capacity.


def test_actor_without_free_slots_is_refused_loudly_and_joins_once_there_are_some(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner(serving__max_slots=4)
    first = start_actor(learner.address)
    learner.steps_on()
    second = start_actor(learner.address)
    eventually(lambda: second.says("resource_exhausted") and second.says("4 of 4 slots are taken"))
    assert learner.service.serving.sessions_refused["no_capacity"] >= 1
    first.stop()
    eventually(lambda: second.requests >= 10)
    assert not second.wrong


def test_lockstep_learner_refuses_a_second_actor_with_the_reason(start_learner: StartLearner) -> None:
    learner = start_learner(lockstep=True, actors__groups=1)
    with RawActor(learner.address) as one, RawActor(learner.address) as other:
        one.join()
        other.hello()
        expect_refusal(other, Code.RESOURCE_EXHAUSTED, ["lock-step", "one actor"])


def test_dead_actor_frees_its_slots_while_others_go_on(start_learner: StartLearner, start_actor: StartActor) -> None:
    """A1: within 1 s its slots are free and its partial unrolls are discarded and counted."""
    learner = start_learner(serving__max_slots=8)
    actor = start_actor(learner.address)
    raw = RawActor(learner.address)
    raw.join()
    raw.step()
    assert list(map(len, raw.receive().act.action)) == [16]
    raw.cut()
    within(1.0, lambda: len(learner.service.inference.sessions.open) == 1)
    assert learner.service.serving.rows_dropped["partial_unroll"] == 4
    assert learner.service.serving.unrolls_dropped["session_ended"] == 4
    learner.steps_on()
    with RawActor(learner.address) as heir:
        heir.join()
        heir.step()
        assert heir.receive().HasField("act")
    assert len(actor.pools) == 1
    assert not actor.wrong


def test_rows_of_a_dead_session_are_dropped_from_the_batch_they_wait_for(start_learner: StartLearner) -> None:
    """A1: at once, so that they count for no batch."""
    learner = start_learner(serving__min_rows=8, serving__max_wait=600.0)
    dead = RawActor(learner.address)
    dead.join()
    dead.step()
    eventually(lambda: learner.service.inference.batcher.waiting_rows == 4)
    dead.cut()
    within(1.0, lambda: not learner.service.inference.sessions.open)
    assert learner.service.serving.rows_dropped["session_ended"] == 4
    assert learner.service.inference.batcher.waiting_rows == 0
    with RawActor(learner.address) as one, RawActor(learner.address) as other:
        for number, alive in enumerate((one, other)):
            alive.join()
            alive.step(number)
        assert one.receive().act.request_id == [0]
        assert other.receive().act.request_id == [1]


# Shutting down: nobody hangs.


def test_shutdown_while_a_batch_is_partial_ends_everybody(start_learner: StartLearner, start_actor: StartActor) -> None:
    learner = start_learner(serving__min_rows=64, serving__max_wait=600.0)
    actor = start_actor(learner.address)
    eventually(lambda: learner.service.inference.batcher.waiting_rows == 4)
    summary = learner.stop()
    assert summary["status"] == "interrupted"
    eventually(lambda: actor.says("the test is over"))
    actor.stop()


class GatedService(LearnerProcess):
    """Holds its first batch until `gate` opens."""

    running: threading.Event
    gate: threading.Event

    def _build(self, spec: Any) -> None:
        super()._build(spec)
        inference = self.inference.batches._inference
        launch = inference.launch

        def gated(requests: Any) -> None:
            self.running.set()
            assert self.gate.wait(DEADLINE)
            launch(requests)

        inference.launch = gated  # type: ignore[method-assign]


def test_shutdown_while_inference_runs_waits_for_it_and_ends(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    GatedService.running, GatedService.gate = threading.Event(), threading.Event()
    learner = start_learner(GatedService)
    actor = start_actor(learner.address)
    assert GatedService.running.wait(DEADLINE)
    learner.service.stop.ask("interrupted", "in the middle of a batch")
    eventually(lambda: learner.service.inference.batches._stopping)
    GatedService.gate.set()
    learner.join()
    assert learner.living_threads() == []
    assert learner.service.serving.batches == 1  # that one was served to its end
    actor.stop()


def test_full_store_slows_the_actors_and_shutdown_still_ends(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner(IdleLearnerService)
    actor = start_actor(learner.address)
    serving = learner.service.serving
    eventually(lambda: serving.serving_seconds["hold"] > 0.5)
    steps = learner.env_steps
    eventually(lambda: serving.serving_seconds["hold"] > 1.0)
    assert learner.env_steps == steps
    assert learner.service.training.store.ready == learner.service.training.store.capacity
    assert not actor.ended()
    learner.stop()
    actor.stop()


def test_shutdown_with_an_idle_stream_tells_it_and_ends(start_learner: StartLearner) -> None:
    learner = start_learner()
    with RawActor(learner.address) as raw:
        raw.join()
        learner.service.stop.ask("interrupted", "closing time")
        control = raw.receive().control
        assert control.command == pb.Control.COMMAND_DRAIN
        assert control.reason == "closing time"
        learner.join()
        assert learner.living_threads() == []


def test_shutdown_with_a_stream_that_never_said_hello_ends(start_learner: StartLearner) -> None:
    learner = start_learner()
    with RawActor(learner.address) as raw, RawActor(learner.address) as seen:
        seen.hello()
        assert seen.receive().HasField("welcome")  # so the other one is connected as well, or will be refused
        learner.stop()
        assert raw.status()[0] in (Code.UNAVAILABLE, Code.CANCELLED)


def test_shutdown_before_any_actor_came_ends_with_a_summary(start_learner: StartLearner) -> None:
    learner = start_learner()
    summary = learner.stop()
    assert summary["env_steps"] == 0
    assert summary["status"] == "interrupted"


def test_resumed_learner_stopped_before_any_actor_came_keeps_the_counters(
    start_learner: StartLearner, start_actor: StartActor, tmp_path: Path
) -> None:
    learner = start_learner()
    actor = start_actor(learner.address)
    learner.steps_on()
    summary = learner.stop()
    actor.stop()
    start_learner().stop()
    kept = ("env_steps", "updates", "episodes", "return_mean_100", "policy_lag_mean")
    assert {name: summary_of(tmp_path / "run")[name] for name in kept} == {name: summary[name] for name in kept}


def test_learner_that_is_done_ends_its_actors_with_success(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner()
    actors = [start_actor(learner.address) for _ in range(2)]
    eventually(lambda: all(actor.requests for actor in actors))
    assert learner.stop("done")["status"] == "done"
    for actor in actors:
        actor.join()
        assert actor.says("the test is over")
    eventually(lambda: all(actor.pools[-1].closed for actor in actors))


def test_learner_thread_that_dies_takes_the_service_with_it_and_says_why(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner(model__name="tests.integration.support:FailingModel")
    actor = start_actor(learner.address)
    with pytest.raises(ThreadDied, match=r"thread learner died: ArithmeticError.*cannot be trained"):
        learner.join()
    assert learner.living_threads() == []
    eventually(lambda: actor.says("thread learner died"))
    assert not actor.ended()


# What the learner may ask of an actor.


def test_control_end_ends_the_actor_with_success(start_actor: StartActor) -> None:
    with ScriptedLearner(serve_then(Command.END)) as learner:
        actor = start_actor(learner.address)
        actor.join()
        assert learner.sessions == 1
    assert actor.says("because")
    eventually(lambda: actor.pools[0].closed)


def test_control_drain_makes_the_actor_try_again(start_actor: StartActor) -> None:
    with ScriptedLearner(serve_then(Command.DRAIN, Command.END)) as learner:
        actor = start_actor(learner.address)
        actor.join()
        assert learner.sessions == 2
    assert actor.says("the learner says: because; trying again")
    eventually(lambda: all(pool.closed for pool in actor.pools))


def test_control_reset_makes_the_actor_join_again_without_complaint(start_actor: StartActor) -> None:
    with ScriptedLearner(serve_then(Command.RESET, Command.END)) as learner:
        actor = start_actor(learner.address)
        actor.join()
        assert learner.sessions == 2
    assert len(actor.pools) == 2
    assert not actor.says("trying again")


# Peers that fall silent.


def test_learner_that_answers_no_step_is_given_up_after_the_step_deadline(start_actor: StartActor) -> None:
    """A4: port open, no progress."""
    with ScriptedLearner(never_answer) as learner:
        actor = start_actor(learner.address, step_deadline=0.4)
        eventually(lambda: learner.sessions >= 2)
        assert actor.says("the learner has not answered for")
        actor.stop()


def test_learner_that_answers_no_step_is_left_once_patience_is_over(start_actor: StartActor) -> None:
    with ScriptedLearner(never_answer) as learner:
        actor = start_actor(learner.address, step_deadline=0.2, patience=1.0)
        with pytest.raises(LearnerLost, match="has not answered"):
            actor.join()


def test_learner_that_never_welcomes_is_given_up_after_the_step_deadline(start_actor: StartActor) -> None:
    def listen_only(requests: Iterator[pb.StreamRequest]) -> Iterator[pb.StreamResponse]:
        yield from ()
        for _ in requests:
            pass

    with ScriptedLearner(listen_only) as learner:
        actor = start_actor(learner.address, step_deadline=0.2, patience=1.0)
        with pytest.raises(LearnerLost, match="has not answered"):
            actor.join()


def test_actor_without_a_learner_gives_up_after_its_patience(start_actor: StartActor) -> None:
    address = free_address()
    with pytest.raises(LearnerLost, match=f"no learner at {address}"):
        start_actor(address, patience=0.5).join()


def test_actor_asked_to_stop_while_it_waits_for_a_learner_returns(start_actor: StartActor) -> None:
    actor = start_actor(free_address())
    eventually(lambda: actor.says("trying again"))
    actor.stop()


def test_actor_asked_to_stop_while_the_learner_is_silent_returns(start_actor: StartActor) -> None:
    with ScriptedLearner(never_answer) as learner:
        actor = start_actor(learner.address)
        eventually(lambda: actor.pools)
        actor.stop()


# Environments that fail.


class BrokenPool(SignedPool):
    """Fails in its hundredth call of `where`, long after its first steps."""

    def __init__(self, job: Welcome, threads: int, where: str) -> None:
        super().__init__(job, threads)
        self._where = where
        self._calls = {"recv": 0, "send": 0}

    def recv(self) -> Rows:
        self._count("recv")
        return super().recv()

    def send(self, action: Any, env_id: Any) -> None:
        self._count("send")
        super().send(action, env_id)

    def _count(self, call: str) -> None:
        self._calls[call] += 1
        if call == self._where and self._calls[call] == 100:
            raise ZeroDivisionError("the simulator exploded")


@pytest.mark.parametrize("where", ["recv", "send"])
def test_environment_that_raises_is_made_anew_and_the_error_is_named(
    start_learner: StartLearner, start_actor: StartActor, where: str
) -> None:
    """A10: within 5 s; actor and learner say why and count it."""
    learner = start_learner()
    said: list[str] = []
    learner.service.inference.protocol._say = said.append
    actor = start_actor(learner.address, failing_once(functools.partial(BrokenPool, where=where)))
    eventually(lambda: actor.says("the simulator exploded"))
    took = within(5.0, lambda: len(actor.pools) == 2 and actor.requests > 10)
    print(f"steps again after {took:.1f} s")
    assert actor.pools[0].closed
    assert actor.says("ZeroDivisionError('the simulator exploded'); making new environments\nTraceback")
    assert actor.actor.metrics.actor_env_failures == 1
    assert learner.service.serving.actors_env_failures == 1
    assert any("joined" in line and "the simulator exploded" in line for line in said)
    assert not actor.wrong


def test_environments_that_fail_too_often_end_the_actor_and_name_the_error(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    """A10: too many restarts end the actor, non-zero."""
    learner = start_learner()
    actor = start_actor(learner.address, functools.partial(BrokenPool, where="recv"), max_env_failures=2)
    with pytest.raises(EnvFailed, match=r"failed 3 times within 10 minutes.*max_env_failures.*the simulator exploded"):
        actor.join()
    assert EnvFailed.exit_code == 5
    assert len(actor.pools) == 3
    eventually(lambda: not learner.service.inference.sessions.open)
    eventually(lambda: all(pool.closed for pool in actor.pools))


def test_environments_that_cannot_be_made_later_are_made_again_and_at_first_end_the_actor(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    """A10: settings that cannot work would fail again in the same way, and so would what has never worked."""

    def explode(job: Welcome, threads: int) -> Any:
        raise OSError("no display")

    def refuse(job: Welcome, threads: int) -> Any:
        raise ConfigError("no such environment")

    learner = start_learner()
    makers = iter([functools.partial(BrokenPool, where="recv"), explode, SignedPool])
    actor = start_actor(learner.address, lambda job, threads: next(makers)(job, threads))
    eventually(lambda: len(actor.pools) == 2 and actor.requests > 10)
    assert actor.says("could not be made: OSError('no display'); making new environments")
    with pytest.raises(
        EnvBroken, match=r"could not be made: OSError\('no display'\); the environments failed in their"
    ):
        start_actor(learner.address, explode).join()
    with pytest.raises(ConfigError, match="no such environment"):
        start_actor(learner.address, refuse).join()


class SilentPool(SignedPool):
    """Its environments do not finish their fourth step before `over`."""

    over: threading.Event

    def recv(self) -> Rows:
        if len(self.sent) == 4:
            self.over.wait()
        return super().recv()


def test_environment_that_stops_answering_is_made_anew_after_the_step_deadline(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    """A10."""
    SilentPool.over = threading.Event()
    learner = start_learner(actors__groups=1)
    pools: list[type[SignedPool]] = [SilentPool]
    actor = start_actor(learner.address, lambda *arguments: pools[-1](*arguments), step_deadline=2.0)
    eventually(lambda: actor.says("environment 0 has not answered for 2 s; making new environments"))
    pools.append(SignedPool)
    eventually(lambda: type(actor.pools[-1]) is SignedPool and actor.requests > 10)
    assert learner.service.serving.actors_env_failures >= 1
    SilentPool.over.set()


class OneHangsPool(SignedPool):
    """Environment 0 never finishes its first step; the others go on."""

    def send(self, action: Any, env_id: Any) -> None:
        if 0 not in env_id:
            super().send(action, env_id)


def test_environment_that_hangs_while_others_go_on_is_named_and_made_anew(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    """A learner that is slow to answer ends a session, too: the environment hangs until it has been named."""
    words = "environment 0 has not answered for 2 s; making new environments"
    pools: list[type[SignedPool]] = [OneHangsPool]
    learner = start_learner(actors__groups=2)
    actor = start_actor(learner.address, lambda *arguments: pools[-1](*arguments), step_deadline=2.0)
    eventually(lambda: actor.says(words))
    pools.append(SignedPool)
    eventually(lambda: type(actor.pools[-1]) is SignedPool and actor.requests > 10)


# What else the port offers.


def test_health_says_not_serving_before_the_first_actor_and_serving_afterwards(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner()
    with grpc.insecure_channel(learner.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        def status(service: str) -> int:
            request = health_pb2.HealthCheckRequest(service=service)
            return stub.Check(request, timeout=DEADLINE, wait_for_ready=True).status

        not_serving, serving = (
            health_pb2.HealthCheckResponse.NOT_SERVING,
            health_pb2.HealthCheckResponse.SERVING,
        )
        assert [status(""), status(SERVICE)] == [not_serving, not_serving]
        start_actor(learner.address)
        eventually(lambda: [status(""), status(SERVICE)] == [serving, serving])


def test_reflection_lists_and_describes_the_service(start_learner: StartLearner) -> None:
    learner = start_learner()
    with grpc.insecure_channel(learner.address) as channel:
        grpc.channel_ready_future(channel).result(timeout=DEADLINE)
        database = ProtoReflectionDescriptorDatabase(channel)
        assert SERVICE in database.get_services()
        described = DescriptorPool(database).FindServiceByName(SERVICE)
    assert [method.name for method in described.methods] == ["Stream", "Status", "Control"]


def test_report_of_an_actor_reaches_its_session(
    start_learner: StartLearner, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envs_server.session, "REPORT_SECONDS", 0.0)
    learner = start_learner()
    start_actor(learner.address, name="reporter")
    session = eventually(lambda: next(iter(learner.service.inference.sessions.open.values()), None))
    eventually(lambda: min(session.reports.newest._replace(reconnects=1)) > 0)
    assert session.name == "reporter"
    serving = learner.service.serving
    eventually(lambda: serving.actors_requests > 50)
    assert serving.actors_steps >= 4 / 2 * serving.actors_requests  # two groups of the four environments
    assert 0 < serving.actors_round_trip_seconds / serving.actors_requests < DEADLINE


def test_report_of_a_later_session_counts_one_reconnect(
    start_learner: StartLearner, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envs_server.session, "REPORT_SECONDS", 0.0)
    learner = start_learner()
    with Wire(learner.address) as wire:
        actor = start_actor(wire.address)
        eventually(lambda: learner.service.serving.actors_requests > 0)
        for session in (1, 2):
            wire.cut()
            eventually(lambda expected=session: learner.service.serving.actors_reconnects == expected)
        actor.stop()
    assert actor.actor.metrics.actor_sessions == 3


# Helpers.


def failing_once(first: Callable[..., Any]) -> Callable[..., Any]:
    """What makes pools for an actor: `first` the first time, good ones from then on."""
    makers = itertools.chain([first], itertools.repeat(SignedPool))
    return lambda job, threads: next(makers)(job, threads)


def begin(requests: Iterator[pb.StreamRequest], num_envs: int = 4, group_size: int = 4) -> Iterator[pb.StreamResponse]:
    assert receive(requests).HasField("hello")
    yield codec.encode_welcome(make_job(num_envs, group_size))
    assert receive(requests).HasField("ready")


def receive(requests: Iterator[pb.StreamRequest]) -> pb.StreamRequest:
    for message in requests:
        return message
    raise ActorLeft


def next_step(requests: Iterator[pb.StreamRequest]) -> pb.Step:
    while not (message := receive(requests)).HasField("step"):
        pass
    return message.step


def answer(step: pb.Step) -> pb.StreamResponse:
    parts = StepParts(step.request_id, step.env_id, list(step.observation), step.reward, step.flags)
    rows = codec.decode_step(parts, SPEC, num_envs=8)
    action = right_action(rows.observation).astype(np.int32)
    return codec.encode_response(codec.encode_act([step.request_id], action))


def never_answer(requests: Iterator[pb.StreamRequest]) -> Iterator[pb.StreamResponse]:
    yield from begin(requests)
    for _ in requests:
        pass


def serve_then(*commands: Command) -> Any:
    """A script that answers some steps in each session and then gives the next of `commands`."""
    coming = iter(commands)

    def script(requests: Iterator[pb.StreamRequest]) -> Iterator[pb.StreamResponse]:
        yield from begin(requests)
        for _ in range(5):
            yield answer(next_step(requests))
        yield codec.encode_response(Control(next(coming), "because"))

    return script
