"""How sessions end when nobody says goodbye: superseded, silent, stopped."""

import signal
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from seedrl.roles.learner import LearnerProcess
from seedrl.serving.sessions import Request
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.processes import Commands, Process
from tests.integration.support import NUM_ACTIONS, RawActor, RunningLearner, Wire, make_rows
from tests.integration.waiting import DEADLINE, eventually, free_address, within

Code = grpc.StatusCode


# Fencing.


def test_newer_session_of_the_same_actor_ends_the_older_and_takes_its_slots(start_learner: StartLearner) -> None:
    """B7: an actor behind a link that broke unnoticed never meets NoCapacity because of itself."""
    learner = start_learner(serving__max_slots=4, serving__min_rows=4, serving__max_wait=600.0)
    serving = learner.service.serving
    with RawActor(learner.address) as old, RawActor(learner.address) as new:
        old.join(instance="a", epoch=1)
        old.step(1, **make_rows([0, 1])._asdict())
        eventually(lambda: learner.service.inference.batcher.waiting_rows == 2)
        job = new.join(instance="a", epoch=2)
        assert old.status() == (Code.ABORTED, "superseded by a newer session of the same actor")
        assert list(learner.service.inference.sessions.open) == [job.session_id]
        new.step(7)
        assert new.receive().act.request_id == [7]  # the rows of the old one fill no batch
    assert serving.sessions_evicted["superseded"] == 1
    assert serving.rows_dropped["session_ended"] == 2
    eventually(lambda: serving.sessions_left == 1)
    assert serving.sessions_joined == 2


@pytest.mark.parametrize("epoch", [1, 2])
def test_older_or_equal_epoch_is_refused_and_the_open_session_stays(start_learner: StartLearner, epoch: int) -> None:
    """B7."""
    learner = start_learner()
    with RawActor(learner.address) as new, RawActor(learner.address) as stray:
        new.join(instance="a", epoch=2)
        stray.hello(instance="a", epoch=epoch)
        code, words = stray.status()
        assert code is Code.ABORTED
        assert words == f"epoch: expected more than 2, which this actor's open session has, saw {epoch}"
        new.step(7)
        assert new.receive().act.request_id == [7]
    assert learner.service.serving.sessions_refused["superseded"] == 1


def test_actors_of_other_instances_or_of_none_are_never_fenced(start_learner: StartLearner) -> None:
    """B7."""
    learner = start_learner()
    with RawActor(learner.address) as one, RawActor(learner.address) as other, RawActor(learner.address) as third:
        for actor, instance in ((one, ""), (other, ""), (third, "a")):
            actor.join(instance=instance, epoch=5)
        eventually(lambda: len(learner.service.inference.sessions.open) == 3)
        with RawActor(learner.address) as fourth:
            fourth.join(instance="b", epoch=1)
            eventually(lambda: len(learner.service.inference.sessions.open) == 4)


def test_epoch_is_forgotten_with_its_session(start_learner: StartLearner) -> None:
    """B7: only open sessions are remembered."""
    learner = start_learner()
    with RawActor(learner.address) as raw:
        raw.join(instance="a", epoch=9)
    eventually(lambda: not learner.service.inference.sessions.open)
    with RawActor(learner.address) as raw:
        assert raw.join(instance="a", epoch=1).num_envs == 4


def test_actor_whose_half_open_link_keeps_its_slots_gets_them_back_at_once(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    """B7: the learner still believes in the old session when the actor joins again."""
    learner = start_learner(serving__max_slots=4)
    with Wire(learner.address) as wire:
        actor = start_actor(wire.address)
        learner.steps_on()
        wire.cut_unnoticed()
        eventually(lambda: len(actor.pools) == 2 and actor.requests > 0)
        actor.stop()
    assert learner.service.serving.sessions_refused["no_capacity"] == 0
    assert learner.service.serving.sessions_evicted["superseded"] == 1
    assert not actor.wrong


def test_superseded_actor_comes_back_under_another_name_and_neither_ends_the_other(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    """B7: two processes with one instance, such as a copy of a running one, must not play ping-pong."""
    learner = start_learner()
    actor = start_actor(learner.address)
    learner.steps_on()
    instance = actor.actor._instance
    with RawActor(learner.address) as stray:
        stray.join(instance=instance, epoch=10)
        eventually(lambda: len(actor.pools) == 2 and actor.requests > 0)
        assert actor.says("superseded by a newer session of the same actor; trying again")
        assert actor.actor._instance != instance
        assert len(learner.service.inference.sessions.open) == 2
    assert learner.service.serving.sessions_evicted["superseded"] == 1
    assert not actor.wrong


# Silence.


def test_actor_that_owes_a_step_for_too_long_is_sent_away(start_learner: StartLearner) -> None:
    """A2: also a process that keeps its connection alive and does nothing."""
    learner = start_learner(serving__max_silence=0.3)
    with RawActor(learner.address) as raw:
        raw.join()
        code, words = raw.status()
    assert code is Code.DEADLINE_EXCEEDED
    assert words.startswith("message: expected step within 0.3 s, saw nothing for")
    assert not learner.service.inference.sessions.open
    assert learner.service.serving.sessions_evicted["too_late"] == 1


def test_actor_that_waits_for_actions_owes_nothing(start_learner: StartLearner) -> None:
    """A2: however long the learner takes; the time begins with the answer."""
    learner = start_learner(serving__max_silence=1.0, serving__min_rows=5, serving__max_wait=1.5)
    with RawActor(learner.address) as raw:
        raw.join()
        raw.step(1)
        assert raw.receive().act.request_id == [1]
        raw.step(2, flags=make_rows(flags=0).flags)
        assert raw.receive().act.request_id == [2]


def test_actor_may_be_silent_for_ever_if_told_so(start_learner: StartLearner) -> None:
    learner = start_learner(serving__max_silence=0.0)
    with RawActor(learner.address) as raw:
        session = raw.join().session_id
        eventually(lambda: session in learner.service.inference.sessions.open)
        raw.step()
        assert raw.receive().HasField("act")


# A learner that is wedged.


class WedgedService(LearnerProcess):
    """Stands still in its first batch, port open, until `gate` opens."""

    gate: threading.Event

    def _build(self, spec: Any) -> None:
        super()._build(spec)
        launch = self.inference.batches._inference.launch

        def wedged(requests: list[Request]) -> None:
            assert self.gate.wait(DEADLINE)
            launch(requests)

        self.inference.batches._inference.launch = wedged  # type: ignore[method-assign]


def test_wedged_learner_is_given_up_after_the_step_deadline_and_joined_again_when_it_goes_on(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    """A4: the actor says so and tries again; attempts the learner never saw leave nothing behind."""
    WedgedService.gate = threading.Event()
    learner = start_learner(WedgedService, serving__max_slots=4)
    actor = start_actor(learner.address, step_deadline=0.3)
    eventually(lambda: actor.says("the learner has not answered for"))
    print(actor.said[-1])
    eventually(lambda: actor.actor.metrics.actor_failures >= 2)
    WedgedService.gate.set()
    eventually(lambda: actor.requests > 10)
    eventually(lambda: len(learner.service.inference.sessions.open) == 1)
    assert learner.service.serving.sessions_refused["no_capacity"] == 0
    assert not actor.wrong


# Processes that are killed or stopped.


class Watched:
    """A learner that remembers whose rows were asked for, and an actor in a process of its own."""

    def __init__(self, learner: RunningLearner, commands: Commands) -> None:
        self.learner = learner
        self.rows_of: list[int] = []  # session ids, in order
        submit = learner.service.inference.batcher.submit

        def remember(request: Request) -> None:
            self.rows_of.append(request.session.id)
            submit(request)

        learner.service.inference.batcher.submit = remember  # type: ignore[method-assign]
        self.actor: Process = commands.start("actor", f"learner={learner.address}")

    def session(self) -> int:
        """Return the session of the actor, once it steps."""
        return int(eventually(lambda: self.rows_of and max(self.learner.service.inference.sessions.open, default=0)))


@pytest.mark.long
def test_killed_actor_leaves_nothing_behind_and_the_others_lose_no_step(
    start_learner: StartLearner, start_actor: StartActor, commands: Commands
) -> None:
    """A1: four actors, one killed three times wherever it is: within 1 s its slots are free and its partial unrolls
    discarded; no other one loses a row, and batches go on."""
    learner = start_learner(
        serving__max_slots=16,
        serving__min_rows=16,  # of all four: a learner that waited for the dead would show it
        env__id="mock",
        env__options={"shape": [3], "dtype": "float32", "num_actions": NUM_ACTIONS},
        metrics="",
    )
    serving, sessions = learner.service.serving, learner.service.inference.sessions
    others = [start_actor(learner.address) for _ in range(3)]
    for kills in range(1, 4):
        actor = commands.start("actor", f"learner={learner.address}", "name=victim")
        session = eventually(lambda: next((each for each in sessions.open.values() if each.name == "victim"), None))
        eventually(lambda session=session: session.traffic.steps > 40)
        actor.signal(signal.SIGKILL)
        took = within(1.0, lambda session=session: not session.alive)
        print(f"gone after {took:.2f} s")
        assert sessions.slots_taken == 12
        assert 0 < serving.unrolls_dropped["session_ended"] <= 4 * kills
        learner.steps_on()
    assert learner.service.inference.batcher.waiting_rows <= 12
    assert serving.rows_dropped["session_ended"] <= 4 * kills  # its own, at most one row of each environment
    assert not any(other.wrong or len(other.pools) > 1 for other in others)


@pytest.mark.long
def test_stopped_actor_is_evicted_and_joins_again_when_it_goes_on(
    start_learner: StartLearner, commands: Commands, tmp_path: Path
) -> None:
    """A2: within 15 s, over TCP and over a unix socket; then a clear error, a new session within 5 s, and no row of
    the old one."""
    learners = [
        start_learner(
            listen=listen,
            run_dir=str(tmp_path / f"run-{number}"),
            env__id="CartPole-v1",
            model__name="mlp",
            metrics="",
        )
        for number, listen in enumerate([free_address(), f"unix:{tmp_path}/learner.sock"])
    ]
    stopped = [Watched(learner, commands) for learner in learners]
    old = [each.session() for each in stopped]
    for each in stopped:
        each.actor.signal(signal.SIGSTOP)
    took = within(15.0, lambda: not any(learner.service.inference.sessions.open for learner in learners))
    print(f"evicted after {took:.1f} s")
    before = [len(each.rows_of) for each in stopped]
    for each in stopped:
        each.actor.signal(signal.SIGCONT)
    took = within(5.0, lambda: all(len(each.rows_of) > rows for each, rows in zip(stopped, before, strict=True)))
    print(f"stepped again after {took:.1f} s")
    for each, session, rows in zip(stopped, old, before, strict=True):
        each.learner.steps_on()
        assert session not in each.rows_of[rows:]
        assert "trying again" in each.actor.out
        assert "unavailable" in each.actor.out
