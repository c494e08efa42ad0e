"""This rank's part in the rounds of agreement: what it says, and what it does about what the others say.

Knows nothing of training. One rank alone agrees with itself, at no cost.
"""

import math
from collections.abc import Callable

from seedrl.config import StopConfig
from seedrl.learning.agreement import Agreed, Load, Progress, Said
from seedrl.learning.ranks import Ranks
from seedrl.metrics import ServingMetrics
from seedrl.serving.sessions import SessionTable
from seedrl.stopping import EPISODES, Stop, reached_goal


class Rounds:
    """Owned by the main thread, and by the learner thread while that runs. `progress` and `on_loads` are for any."""

    def __init__(
        self,
        ranks: Ranks,
        stop: Stop,
        goal: StopConfig,
        serving: ServingMetrics,
        sessions: SessionTable,
        is_save_due: Callable[[], bool],
    ) -> None:
        self._ranks = ranks
        self._stop = stop
        self._goal = goal
        self._serving = serving
        self._sessions = sessions
        self._is_save_due = is_save_due
        self.agreed = Agreed()  # in the newest round
        self.on_loads: Callable[[list[Load]], None] = lambda loads: None  # called in every round, by rank
        self.is_open: Callable[[], bool] = lambda: True  # to new actors

    def go_on(self, has_batch: bool = False) -> bool:
        """One round; whether all ranks go on. They stop in the same round, all for the same reason."""
        said = Said(
            has_batch=has_batch,
            stop=self._stop.status if self._stop.is_set() else "",
            is_save_due=self._is_save_due(),
            knows_spaces=self._sessions.spec.done(),
            progress=self._own_progress(),
            load=self.own_load(),
        )
        self.agreed = agreed = Agreed(tuple(map(Said.of, self._ranks.gather_rows(said.row()))))
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
        return self._own_progress() if self._ranks.is_alone else self.agreed.progress

    def own_load(self) -> Load:
        slots, recent = self._sessions.config.serving.max_slots, self._sessions.recent
        round_trip = recent.round_trip_seconds / recent.requests if recent.requests else 0.0
        return Load(slots - self._sessions.slots_taken, slots, round_trip, self.is_open())

    def _own_progress(self) -> Progress:
        """Of the last hundred episodes every rank tells its share."""
        serving = self._serving
        newest = list(serving.returns.copy())  # another thread may add to it
        returns = newest[-math.ceil(EPISODES / self._ranks.identity.world_size) :]
        return Progress(serving.env_steps, serving.episodes, sum(returns), len(returns))

    def _stop_for(self, rank: int) -> None:
        status, reason = self._ranks.share([self._stop.status, self._stop.reason], source=rank)
        if rank != self._ranks.identity.rank:
            self._stop.obey(status, f"rank {rank}: {reason}")
