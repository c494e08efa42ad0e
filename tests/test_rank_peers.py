"""A learner process among others: when its actors count as idle, and how ranks agree on updates and on spaces."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from seedrl.config import LearnerConfig, StopConfig
from seedrl.errors import Diverged, Mismatch, RankLost
from seedrl.learning.loop import TrainingLoop
from seedrl.metrics import LearningMetrics, ServingMetrics
from seedrl.ranks.activity import QUIET_SECONDS, ActorActivity
from seedrl.ranks.agreement import Vote
from seedrl.ranks.peers import RankPeers
from seedrl.ranks.rounds import VotingRounds
from seedrl.run.stopping import Stop
from seedrl.serving.batcher import Batcher
from seedrl.serving.seats import planned_seats
from seedrl.serving.service import InferenceService
from seedrl.serving.sessions import Request, Session, SessionTable
from seedrl.specs import EnvSpec
from seedrl.status import Status
from seedrl.wire.messages import Command, Hello
from tests.fakes import FakeClock, make_spec
from tests.rig import make_rows
from tests.thread_ranks import ThreadRanks, every


class Actors:
    """The sessions of one rank, and whether they count as idle."""

    def __init__(self) -> None:
        config = LearnerConfig()
        self.clock = FakeClock()
        self.metrics = ServingMetrics()
        self.sessions = SessionTable(config, lambda session: session, planned_seats(config))
        self.batcher: Batcher[Request] = Batcher(8, 1, 1.0)
        self.is_idle = ActorActivity(self.sessions, self.batcher, self.metrics, self.clock).is_idle

    def join(self, name: str = "actor", is_ready: bool = True) -> Session:
        session, _ = self.sessions.join(Hello(name))
        session.has_joined = is_ready
        return session


def test_rank_without_actors_is_idle() -> None:
    assert Actors().is_idle()


def test_rank_is_idle_until_the_first_row_of_an_actor() -> None:
    actors = Actors()
    session = actors.join(is_ready=False)
    assert actors.is_idle()
    session.has_joined = True
    assert actors.is_idle()
    actors.metrics.rows += 8
    assert not actors.is_idle()


def test_rank_is_idle_while_all_of_its_actors_are_paused() -> None:
    actors = Actors()
    first, second = actors.join("first"), actors.join("second")
    actors.metrics.rows += 8
    assert not actors.is_idle()
    first.is_paused = True
    assert not actors.is_idle()
    second.is_paused = True
    assert actors.is_idle()
    first.is_paused = False
    assert not actors.is_idle()


def test_rank_is_idle_when_its_actors_have_sent_nothing_for_some_seconds() -> None:
    actors = Actors()
    actors.join()
    actors.metrics.rows += 8
    assert not actors.is_idle()
    actors.clock.advance(QUIET_SECONDS)
    assert not actors.is_idle()
    actors.clock.advance(0.1)
    assert actors.is_idle()
    actors.metrics.rows += 8
    assert not actors.is_idle()


def test_rank_whose_rows_wait_for_room_in_the_store_is_not_idle() -> None:
    actors = Actors()
    session = actors.join()
    actors.batcher.submit(Request(session, 1, make_rows([[0.0, 0.0]]), session.lease.slots[:1]))
    actors.clock.advance(10 * QUIET_SECONDS)
    assert not actors.is_idle()


def test_actors_that_send_nothing_do_not_stall_the_other_ranks() -> None:
    """The vote of a rank says whether its actors deliver, not whether they hold slots."""

    def work(ranks: ThreadRanks) -> tuple[bool, bool]:
        actors = Actors()
        session = actors.join(is_ready=False)
        config = LearnerConfig()
        balance = SimpleNamespace(own=lambda: ("", 0, 4, 0.0, True))
        service: Any = SimpleNamespace(sessions=actors.sessions, batcher=actors.batcher, balance=balance)
        saver: Any = SimpleNamespace(is_due=False)
        rounds = RankPeers(config, ranks).rounds(Stop(), service, actors.metrics, saver)
        has_batch = ranks.identity.rank == 0
        assert rounds.agree(has_batch)
        is_due_while_it_is_made = rounds.is_update_due
        session.has_joined = True
        actors.metrics.rows += 8
        assert rounds.agree(has_batch)
        return is_due_while_it_is_made, rounds.is_update_due

    assert every(2, work) == [(True, False), (True, False)]


class Script:
    """A store and a learner that do what a seed decides; every update is a collective operation."""

    def __init__(self, ranks: ThreadRanks, seed: int) -> None:
        self._ranks = ranks
        self._random = random.Random(10 * seed + ranks.identity.rank)
        self.taken: list[bool] = []
        self.skipped_in_a_row, self.has_diverged = 0, False

    def vote(self) -> Vote:
        return Vote(is_idle=self._random.random() < 0.5)

    def wait_for(self, count: int, timeout: float) -> bool:
        return self._random.random() < 0.5

    def take(self, count: int, timeout: float) -> Any:
        return self._random.choice(("unrolls", None))

    def blank(self, count: int) -> Any:
        return "blank"

    def train(self, unrolls: Any) -> None:
        self.taken.append(unrolls == "unrolls")
        assert len(set(self._ranks.all_gather_object(len(self.taken)))) == 1

    assist = train

    def publish(self, policy: Any) -> None: ...


@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_become_idle_at_any_moment_make_the_same_updates(seed: int) -> None:
    """Whatever each rank has when it votes and when it takes, all enter an update or none does."""

    def work(ranks: ThreadRanks) -> int:
        script, stop = Script(ranks, seed), Stop()
        rounds = VotingRounds(ranks, stop, StopConfig(), script.vote)

        def end_after_some_updates() -> Iterator[None]:
            for _ in range(20):
                yield
            stop.ask("done", "enough")
            while True:
                yield

        updates = end_after_some_updates()
        script.publish = lambda policy: next(updates)  # type: ignore[method-assign]
        loop = TrainingLoop(
            script,
            script,
            SimpleNamespace(),  # type: ignore[arg-type]
            rounds,
            LearningMetrics(),
            batch_size=1,
            save=lambda: None,
            diverged=lambda skipped: Diverged(""),
        )
        loop.run()
        return len(script.taken)

    assert every(3, work) == [21, 21, 21]


SPEC, OTHER = make_spec((2,)), make_spec((3,))


def refuse(spec: EnvSpec) -> None:
    raise Mismatch(f"spaces: {spec} do not fit")


def agree_on_spaces(ranks: ThreadRanks, announced: EnvSpec | None, refuses: bool) -> tuple[EnvSpec | None, Stop]:
    """Return what a rank makes of the first spaces announced, and how it stops."""
    config, stop, metrics = LearnerConfig(listen="127.0.0.1:0"), Stop(), ServingMetrics()
    service = InferenceService(
        config,
        metrics,
        plan=planned_seats(config),
        job_seed=lambda session: session,
        on_failure=stop.fail,
        say=lambda words: None,
        describe=lambda: Status(),
        check_spec=refuse if refuses else lambda spec: None,
    )
    peers = RankPeers(config, ranks)
    saver: Any = SimpleNamespace(is_due=False)
    rounds = peers.rounds(stop, service, metrics, saver)
    service.server.start()
    try:
        if announced is not None:
            service.sessions.agree(announced)
        assert rounds.agree()
        return peers.agreed_spec(service), stop
    finally:
        service.server.stop(Command.END, "the test is over")


def test_ranks_agree_on_the_first_spaces_announced() -> None:
    agreed = every(2, lambda ranks: agree_on_spaces(ranks, SPEC if ranks.identity.rank else None, refuses=False))
    assert [spec for spec, _ in agreed] == [SPEC, SPEC]
    assert not any(stop.is_set() for _, stop in agreed)


@pytest.mark.timeout(60)
def test_ranks_all_end_with_the_reason_when_one_refuses_the_spaces_of_another() -> None:
    agreed = every(
        2, lambda ranks: agree_on_spaces(ranks, None if ranks.identity.rank else SPEC, refuses=ranks.identity.rank == 1)
    )
    (first, stop), (second, own_stop) = agreed
    assert first is second is None
    assert isinstance(stop.failure, RankLost)
    assert isinstance(own_stop.failure, Mismatch)
    assert stop.reason == f"rank 1: {own_stop.reason}" == f"rank 1: spaces: {SPEC} do not fit"


@pytest.mark.timeout(60)
def test_ranks_all_end_with_the_reason_when_actors_of_one_have_other_spaces() -> None:
    agreed = every(2, lambda ranks: agree_on_spaces(ranks, OTHER if ranks.identity.rank else SPEC, refuses=False))
    (first, stop), (second, own_stop) = agreed
    assert first is second is None
    assert own_stop.reason == f"spaces: rank 0 trains on {SPEC}; the actors of rank 1 have {OTHER}"
    assert isinstance(stop.failure, RankLost)
    assert stop.reason == f"rank 1: {own_stop.reason}"
