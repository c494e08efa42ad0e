"""Rounds of agreement among ranks that are threads; integration/test_several_ranks.py has processes."""

from seedrl.config import StopConfig
from seedrl.errors import RankLost, ThreadDied
from seedrl.metrics import ServingMetrics
from seedrl.ranks.agreement import Load, Vote
from seedrl.ranks.rounds import VotingRounds
from seedrl.run.stopping import Progress, Stop
from tests.thread_ranks import ThreadRanks, every


def test_rounds_have_the_loads_of_all_ranks() -> None:
    def work(ranks: ThreadRanks) -> list[list[Load]]:
        seen: list[list[Load]] = []
        own = Vote(load=Load(ranks.identity.rank, 4, 0.5, True))
        assert VotingRounds(ranks, Stop(), StopConfig(), lambda: own, seen.append).agree()
        return seen

    loads = [Load(0, 4, 0.5, True), Load(1, 4, 0.5, True)]
    assert every(2, work) == [[loads], [loads]]


def test_rounds_continue_until_a_rank_asks_to_stop_and_then_all_stop_with_its_reason() -> None:
    def work(ranks: ThreadRanks) -> tuple[str, str]:
        stop = Stop()
        rounds = VotingRounds(ranks, stop, StopConfig(), Vote)
        assert rounds.agree(has_batch=True)
        assert rounds.is_update_due
        assert rounds.agree(has_batch=ranks.identity.rank == 0)
        assert not rounds.is_update_due
        if ranks.identity.rank == 1:
            stop.ask("interrupted", "why")
        assert not rounds.agree()
        return stop.status, stop.reason

    assert every(2, work) == [("interrupted", "rank 1: why"), ("interrupted", "why")]


def test_rounds_are_done_when_all_ranks_together_reach_the_goal_and_not_before() -> None:
    def is_done(progress: Progress) -> list[tuple[bool, bool]]:
        def work(ranks: ThreadRanks) -> tuple[bool, bool]:
            stop = Stop()
            rounds = VotingRounds(
                ranks, stop, StopConfig(env_steps=1000, return_mean_100=3.0), lambda: Vote(progress=progress)
            )
            rounds.agree()
            return rounds.stop_if_done(), stop.is_set()

        return every(2, work)

    assert is_done(Progress(499, 3, 100.0, 50)) == 2 * [(False, False)]
    assert is_done(Progress(500, 0, 0.0, 0)) == 2 * [(True, True)]
    assert is_done(Progress(5, 49, 490.0, 49)) == 2 * [(False, False)]
    assert is_done(Progress(5, 50, 150.0, 50)) == 2 * [(True, True)]


def test_progress_of_a_rank_has_its_share_of_the_last_hundred_episodes() -> None:
    serving = ServingMetrics(env_steps=7, episodes=300)
    serving.returns.extend(range(100))
    assert Progress.of(serving, ranks=1) == Progress(7, 300, float(sum(range(100))), 100)
    assert Progress.of(serving, ranks=3) == Progress(7, 300, float(sum(range(66, 100))), 34)


def test_stop_obeys_another_rank_and_fails_with_it() -> None:
    interrupted, failed, own = Stop(), Stop(), Stop()
    interrupted.obey("interrupted", "rank 1: why")
    assert (interrupted.status, interrupted.reason, interrupted.failure) == ("interrupted", "rank 1: why", None)
    failed.ask("interrupted", "first")
    failed.obey("failed", "rank 1: broken")
    assert isinstance(failed.failure, RankLost)
    own.fail(ThreadDied("mine"))
    own.obey("failed", "rank 1: broken")
    assert isinstance(own.failure, ThreadDied)
