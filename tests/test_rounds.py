"""A rank's part in rounds of agreement, alone; integration/test_several_ranks.py has several of them."""

from collections.abc import Callable

from seedrl.config import StopConfig
from seedrl.errors import RankLost, ThreadDied
from seedrl.metrics import ServingMetrics
from seedrl.ranks.agreement import Load, Vote
from seedrl.ranks.group import Ranks
from seedrl.ranks.rounds import VotingRounds
from seedrl.run.stopping import Progress, Stop


def rounds_of(
    stop: Stop, vote: Vote, on_loads: Callable[[list[Load]], None] = lambda loads: None, **goal: float
) -> VotingRounds:
    return VotingRounds(Ranks(), stop, StopConfig(**goal), lambda: vote, on_loads)  # type: ignore[arg-type]


def test_rounds_of_one_rank_go_on_until_it_is_asked_to_stop() -> None:
    stop = Stop()
    loads: list[list[Load]] = []
    rounds = rounds_of(stop, Vote(load=Load(3, 4, 0.5, True)), loads.append)
    assert rounds.agree(has_batch=True)
    assert rounds.is_update_due
    assert rounds.agree()
    assert not rounds.is_update_due
    stop.ask("interrupted", "why")
    assert not rounds.agree()
    assert (stop.status, stop.reason) == ("interrupted", "why")
    assert loads == 3 * [[Load(3, 4, 0.5, True)]]


def test_rounds_are_done_at_the_goal_and_not_before() -> None:
    for steps, returns, is_done in ((999, 100, False), (1000, 0, True), (10, 99, False)):
        stop = Stop()
        progress = Progress(steps, 5, 2.0 * returns, returns)
        rounds = rounds_of(stop, Vote(progress=progress), env_steps=1000, return_mean_100=3.0)
        rounds.agree()
        assert rounds.stop_if_done() is is_done
        assert stop.is_set() is is_done
    solved = Vote(progress=Progress(10, 100, 300.0, 100))
    rounds = rounds_of(Stop(), solved, env_steps=1000, return_mean_100=3.0)
    rounds.agree()
    assert rounds.stop_if_done()


def test_progress_of_a_rank_tells_its_share_of_the_last_hundred_episodes() -> None:
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
