"""The stream on one machine: observations in shared memory, everything else as ever."""

import gc
import os
from pathlib import Path

import pytest

import envs_server.actor
import envs_server.sharing
from seedrl.serving import sessions
from seedrl.wire import codec
from seedrl.wire.memory import open_buffers, this_host
from seedrl.wire.messages import Memory
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.support import SPEC, RawActor, RunningActor, RunningLearner, Wire, make_rows
from tests.integration.waiting import eventually


@pytest.fixture(autouse=True)
def worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "WORTH_BYTES", 1)


def uses_memory(learner: RunningLearner) -> bool:
    return any(
        session.lease.memory is not None and session.lease.busy_buffers
        for session in learner.service.inference.sessions.open.values()
    )


def serves(learner: RunningLearner, actor: RunningActor) -> None:
    learner.steps_on(200)
    eventually(lambda: actor.requests > 0)
    assert not actor.wrong


def test_actor_of_this_machine_uses_the_memory_and_gets_its_own_actions(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner()
    actor = start_actor(learner.address)
    other = start_actor(learner.address)
    eventually(lambda: uses_memory(learner))
    serves(learner, actor)
    serves(learner, other)
    learner.stop()


def test_actor_that_cannot_open_the_memory_goes_on_in_messages(
    start_learner: StartLearner, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(offer: Memory) -> None:
        raise PermissionError(offer.path)

    monkeypatch.setattr(envs_server.sharing, "open_buffers", fail)
    learner = start_learner()
    serves(learner, start_actor(learner.address))
    assert not uses_memory(learner)


def test_no_memory_for_whoever_is_elsewhere_or_told_not_to(
    start_learner: StartLearner, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = start_learner()
    monkeypatch.setattr(envs_server.actor, "this_host", lambda: "another machine/0")
    serves(learner, start_actor(learner.address))
    (session,) = learner.service.inference.sessions.open.values()
    assert session.lease.memory is None
    learner.stop()
    monkeypatch.undo()
    monkeypatch.setattr(sessions, "WORTH_BYTES", 1)
    learner = start_learner(serving__shared_memory=False)
    serves(learner, start_actor(learner.address))
    assert all(session.lease.memory is None for session in learner.service.inference.sessions.open.values())


def test_small_observations_stay_in_messages(
    start_learner: StartLearner, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    learner = start_learner()
    serves(learner, start_actor(learner.address))
    (session,) = learner.service.inference.sessions.open.values()
    assert session.lease.memory is None


def open_memories() -> int:
    gc.collect()
    links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path)]
    return sum("memfd:seedrl" in link for link in links)


@pytest.mark.long
def test_new_session_has_new_memory_and_the_old_is_freed(start_learner: StartLearner, start_actor: StartActor) -> None:
    learner = start_learner()
    with Wire(learner.address) as wire:
        actor = start_actor(wire.address)
        serves(learner, actor)
        for _ in range(5):
            wire.cut()
            serves(learner, actor)
        eventually(lambda: open_memories() <= 4)  # both ends of the newest and, for a moment, of the one before
        actor.stop()


class Sharer(RawActor):
    """Joins as an actor of this machine; `memory` is what it was offered."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.hello(host=this_host())
        self.job = codec.decode_welcome(self.receive().welcome)
        self.send(codec.encode_ready(SPEC))
        self.memory = codec.decode_memory(self.receive().memory)

    def step_in(self, buffer: int, request_id: int = 1, env_id: tuple[int, ...] = (0, 1)) -> None:
        self.send(codec.encode_step(request_id, make_rows(env_id), buffer))


def test_memory_can_be_found_only_until_it_is_used(start_learner: StartLearner) -> None:
    learner = start_learner()
    with Sharer(learner.address) as actor:
        assert Path(actor.memory.path).exists()
        open_buffers(actor.memory)
        actor.step_in(2)
        assert actor.receive().act.request_id == [1]
        assert not Path(actor.memory.path).exists() or "memfd:seedrl" not in os.readlink(actor.memory.path)
        actor.send(codec.encode_step(2, make_rows((2, 3))))  # a message without it is as good
        assert actor.receive().act.request_id == [2]


@pytest.mark.parametrize(("buffer", "complaint"), [(3, "buffer: expected 0 to 2, saw 3"), (1, "buffer: expected one")])
def test_wrong_buffer_ends_its_own_session_only(
    start_learner: StartLearner, start_actor: StartActor, buffer: int, complaint: str
) -> None:
    learner = start_learner(serving__min_rows=64, serving__max_wait=0.5)
    witness = start_actor(learner.address)
    with Sharer(learner.address) as actor:
        actor.step_in(1)
        actor.step_in(buffer, request_id=2, env_id=(2, 3))  # 1 is in flight
        assert complaint in actor.status()[1]
    learner.service.inference.batcher._max_wait = 0.001
    serves(learner, witness)
