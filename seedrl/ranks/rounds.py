"""Rounds of agreement among several ranks, from the view of one of them. Knows nothing of training.

Ranks have a round at least every `POLL_SECONDS` while they wait for train batches, so none waits for another for long.
"""

from collections.abc import Callable

from seedrl.config import StopConfig
from seedrl.learning.loop import POLL_SECONDS
from seedrl.ranks.agreement import Decision, Load, Vote
from seedrl.ranks.group import Ranks
from seedrl.run.stopping import Progress, Stop, reached_goal


class VotingRounds:
    """Owned by the main thread, and by the learner thread while that runs. `progress` is for any thread."""

    def __init__(
        self,
        ranks: Ranks,
        stop: Stop,
        goal: StopConfig,
        own_vote: Callable[[], Vote],
        on_loads: Callable[[list[Load]], None] = lambda loads: None,
    ) -> None:
        """`on_loads` is called in every round with the loads of all ranks."""
        self._ranks = ranks
        self.stop = stop
        self._goal = goal
        self._own_vote = own_vote
        self._on_loads = on_loads
        self.decision = Decision()  # of the newest round

    @property
    def is_update_due(self) -> bool:
        return self.decision.is_update_due

    @property
    def is_save_due(self) -> bool:
        return self.decision.is_save_due

    @property
    def patience(self) -> float:
        """An idle rank does not wait for a train batch, so that the others need not wait for its vote."""
        return 0.0 if self._own_vote().is_idle and not self.decision.are_all_idle else POLL_SECONDS

    @property
    def progress(self) -> Progress:
        return self.decision.progress

    def agree(self, has_batch: bool = False) -> bool:
        """Have a round; return whether all ranks continue. They stop in the same round, for the same reason."""
        stop = self.stop.status if self.stop.is_set() else ""
        vote = self._own_vote()._replace(has_batch=has_batch, stop=stop)
        rows = self._ranks.all_gather_numbers(vote.to_row())
        self.decision = decision = Decision(tuple(map(Vote.from_row, rows)))
        self._on_loads(decision.loads)
        if decision.stopper is not None:
            self._stop_for(decision.stopper)
        return decision.stopper is None

    def stop_if_done(self) -> bool:
        """All ranks compare the same progress with the goal, so all of them reach it in the same round."""
        return self.stop.ask_if_done(reached_goal(self._goal, self.progress))

    def _stop_for(self, rank: int) -> None:
        status, reason = self._ranks.broadcast_object([self.stop.status, self.stop.reason], source=rank)
        if rank != self._ranks.identity.rank:
            self.stop.obey(status, f"rank {rank}: {reason}")
