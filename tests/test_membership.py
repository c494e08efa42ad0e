"""The learner's part of the run context."""

from pathlib import Path

import pytest

from seedrl.config import LearnerConfig
from seedrl.metrics import LearningMetrics, ServingMetrics
from seedrl.run import membership
from seedrl.run.context import LEARNER, Context, ContextFile, State
from seedrl.run.membership import Membership
from seedrl.serving.seats import planned_seats
from seedrl.serving.sessions import SessionTable
from seedrl.wire.messages import Hello


class Rig:
    """A learner's life as far as its context is concerned."""

    def __init__(self, directory: Path, updates: int = 0, incarnation: int = 1) -> None:
        config = LearnerConfig()
        config.serving.max_slots, config.actors.envs = 64, 2
        self.file = ContextFile(directory)
        self.sessions = SessionTable(config, lambda _: 0, planned_seats(config))
        self.serving, self.learning = ServingMetrics(), LearningMetrics(updates=updates)
        self.membership = Membership(
            self.file,
            self.sessions,
            self.serving,
            self.learning,
            newest_checkpoint=lambda: "000000000123",
            desired_actors=lambda: 5,
            incarnation=incarnation,
        )

    def begin(self) -> "Rig":
        self.membership.begin("unix:/tmp/learner", "127.0.0.1:1")
        return self

    def written(self) -> Context:
        self.membership.tick(is_due=True)
        return self.file.read()


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path).begin()


def test_membership_states_follow_each_other(rig: Rig) -> None:
    seen = [rig.file.read().state]
    rig.membership.serve(is_training=False)
    seen.append(rig.file.read().state)
    rig.membership.serve(is_training=True)
    rig.membership.serve(is_training=True)
    seen.append(rig.file.read().state)
    for state in (State.DRAINING, State.DONE):
        rig.membership.enter(state, "enough")
        seen.append(rig.file.read().state)
    assert seen == [State.INIT, State.READY, State.RUNNING, State.DRAINING, State.DONE]
    assert rig.file.read().reason == "enough"


def test_membership_first_update_seen_at_once_still_passes_through_ready(rig: Rig) -> None:
    before = rig.file.read().revision
    rig.membership.serve(is_training=True)
    assert rig.file.read().revision == before + 2


def test_membership_of_streams_has_slots_lease_and_lives(rig: Rig) -> None:
    first, _ = rig.sessions.join(Hello("actor-0"))
    rig.sessions.join(Hello("actor-1"))
    context = rig.written()
    assert [member.name for member in context.affected(LEARNER)] == [LEARNER, "actor-0", "actor-1"]
    assert context.members["actor-0"].slots == 2
    assert context.members["actor-0"].incarnation == 1
    assert context.members["actor-0"].is_leased(context.written)
    rig.sessions.leave(first)
    rig.sessions.join(Hello("actor-0"))
    assert rig.written().members["actor-0"].incarnation == 2


def test_membership_actor_that_left_is_still_known_and_streams_no_more(rig: Rig) -> None:
    session, _ = rig.sessions.join(Hello("actor-0"))
    rig.written()
    rig.sessions.leave(session)
    member = rig.written().members["actor-0"]
    assert (member.streams_to, member.slots) == ("", 2)


def test_membership_of_the_next_learner_goes_on_counting_lives(rig: Rig, tmp_path: Path) -> None:
    rig.sessions.join(Hello("actor-0"))
    rig.written()
    again = Rig(tmp_path, incarnation=2).begin()
    assert again.file.read().members["actor-0"].streams_to == ""  # it has not come back yet
    again.sessions.join(Hello("actor-0"))
    context = again.written()
    assert context.members[LEARNER].incarnation == 2
    assert context.members["actor-0"].incarnation == 2


def test_membership_keeps_what_the_supervisor_wrote(rig: Rig) -> None:
    rig.sessions.join(Hello("actor-0"))
    with rig.file.change() as context:
        context.update("actor-0", pid=99, restarts=3, exit_code=5, last_words="it broke")
    member = rig.written().members["actor-0"]
    assert (member.pid, member.restarts, member.exit_code, member.last_words) == (99, 3, 5, "it broke")


def test_membership_has_progressed_only_after_an_update_of_its_own(rig: Rig, tmp_path: Path) -> None:
    rig.serving.env_steps, rig.learning.updates = 700, 30
    assert rig.written().counters == {"env_steps": 700, "updates": 30, "episodes": 0}
    assert rig.written().has_progressed
    again = Rig(tmp_path, updates=25).begin()  # those of its checkpoint
    assert not again.written().has_progressed
    again.learning.updates = 26
    assert again.written().has_progressed
    assert again.written().checkpoint == "000000000123"
    assert again.written().desired_actors == 5


def test_membership_forgets_strangers_but_not_who_is_supervised(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "GONE_KEPT", 3)
    with rig.file.change() as context:
        context.update("actor-0", pid=99)
    for number in range(10):
        session, _ = rig.sessions.join(Hello(f"stranger-{number}"))
        rig.written()
        rig.sessions.leave(session)
    assert set(rig.written().members) == {LEARNER, "actor-0", "stranger-7", "stranger-8", "stranger-9"}


def test_membership_actor_that_calls_itself_the_learner_takes_nobodys_place(rig: Rig) -> None:
    rig.sessions.join(Hello(LEARNER))
    context = rig.written()
    assert context.members[LEARNER].role == "learner"
    assert [member.role for member in context.affected(LEARNER)] == ["learner", "actor"]


def test_membership_on_a_disk_that_is_gone_goes_on(rig: Rig) -> None:
    rig.file.path.unlink()
    (rig.file.path.parent / ".context.json").mkdir()  # nothing can be written there
    rig.membership.enter(State.READY)
    (rig.file.path.parent / ".context.json").rmdir()
    assert rig.written().state is State.READY
