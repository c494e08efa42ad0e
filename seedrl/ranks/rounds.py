"""This rank's part in the rounds of agreement: what it says, and what it does about what the others say.

Knows nothing of training. One rank alone agrees with itself, at no cost.
"""

import math
from collections.abc import Callable

from seedrl.config import StopConfig
from seedrl.metrics import ServingMetrics
from seedrl.ranks.agreement import Decision, Load, Progress, Vote
from seedrl.ranks.group import Ranks
from seedrl.run.stopping import EPISODES, Stop, reached_goal


class Voting:
    """Owned by the main thread, and by the learner thread while that runs. `progress` is for any."""

    def __init__(self, ranks: Ranks, stop: Stop, goal: StopConfig, own: Callable[[], Vote]) -> None:
        self._ranks = ranks
        self._stop = stop
        self._goal = goal
        self._own = own
        self.agreed = Decision()  # in the newest round
        self.on_loads: Callable[[list[Load]], None] = lambda loads: None  # called in every round, by rank

    def go_on(self, has_batch: bool = False) -> bool:
        """One round; whether all ranks go on. They stop in the same round, all for the same reason."""
        stop = self._stop.status if self._stop.is_set() else ""
        said = self._own()._replace(has_batch=has_batch, stop=stop)
        self.agreed = agreed = Decision(tuple(map(Vote.of, self._ranks.gather_rows(said.row()))))
        self.on_loads(agreed.loads)
        if agreed.stopper is not None:
            self._stop_for(agreed.stopper)
        return agreed.stopper is None

    def stop_if_done(self) -> bool:
        """Whether training is over. All ranks look at the same numbers, so all of them see it after the same round."""
        reason = reached_goal(self._goal, self.progress)
        if reason:
            self._stop.ask("done", reason)
        return bool(reason)

    @property
    def progress(self) -> Progress:
        """Of all ranks: as agreed in the newest round, or as it is now if there is no other."""
        return self._own().progress if self._ranks.is_alone else self.agreed.progress

    def _stop_for(self, rank: int) -> None:
        status, reason = self._ranks.share([self._stop.status, self._stop.reason], source=rank)
        if rank != self._ranks.identity.rank:
            self._stop.obey(status, f"rank {rank}: {reason}")


def progress_of(serving: ServingMetrics, ranks: int) -> Progress:
    """This rank's; of the last hundred episodes each of `ranks` tells its share."""
    newest = list(serving.returns.copy())  # another thread may add to it
    returns = newest[-math.ceil(EPISODES / ranks) :]
    return Progress(serving.env_steps, serving.episodes, sum(returns), len(returns))
