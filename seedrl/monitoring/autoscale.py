"""How many actors the learner could use, from what was measured. Pure: time is that of the rows it is shown.

Of two shares one is next to nothing: either the learner waits for steps, or actors are held back by a full store.

    demand   what the learner would train if it never waited       trained / (1 - wait)
    supply   what an actor would step if it were never held back   acted / (actors × (1 - hold))

What is acted is trained, so demand / supply = actors × (1 - hold) / (1 - wait), whatever the number of actors. It knows
nothing of who starts them: a supervisor, Ray or Kubernetes follows the number, or nobody does.
"""

import math

from seedrl.config import LearnerConfig, serving_ranks
from seedrl.monitoring.diagnosis import BUSY_ENOUGH
from seedrl.monitoring.sampler import Row

SETTLE_SECONDS = 8.0  # after actors came or went: a row looks back over five, and environments begin slowly
SMOOTH_SECONDS = 10.0  # that the newest measurements weigh most
UP_SECONDS, DOWN_SECONDS = 5.0, 30.0  # that a need has to last: a learner that waits costs more than a surplus actor
SURPLUS = 0.1  # share of actors that may be too many
AIM = 0.95  # of what is needed: the last actor is not started for a twentieth of its steps
FASTEST = 2  # times as many at once; supply is known for the actors that are there
FARTHEST = 4.0  # how many times more or less are believed to be needed
FULL = 0.9  # a store this full has enough to train on
STALE = 20.0  # policy lag beyond which more actors would make more of what is too old
WORTH = 0.3  # of the supply that further actors promise has to come, or their machines have nothing left to give
TELLING = 0.15  # growth by less than this share is too little to judge by


class Autoscaler:
    """Owned by the main thread. `before` is what the process before this one wanted; 0 for none."""

    def __init__(self, config: LearnerConfig, before: int = 0) -> None:
        actors, ranks = config.actors, serving_ranks(config)
        self._least = max(1, actors.count // ranks)
        self._most = max(
            self._least, min(-(-actors.at_most // ranks) or math.inf, config.serving.max_slots // actors.envs)
        )
        self.desired = self._bounded(before)
        self._settled = (-math.inf, 0)  # since when there are this many actors
        self._need: float | None = None  # actors, smoothed
        self._supply = 0.0  # steps per second of all actors if none were held back, smoothed
        self._grown_from = (0, 0.0)  # actors and their supply before the newest growth
        self._looked = 0.0
        self._direction, self._since = 0, 0.0  # of the change that is wanted, and since when
        self._candidate = self.desired

    def look(self, row: Row, bottleneck: str) -> int:
        """The number after another row; it stays where nothing can be measured."""
        now, actors = row["seconds"], row["actors"]
        if self._has_settled(now, actors) and row["steps_per_second"] > 0 and row["updates_per_second"] > 0:
            self._measure(now, row)
            self._consider(now, actors, self._bounded(self._wanted(row, bottleneck)))
        return self.desired

    def _bounded(self, number: int) -> int:
        return int(min(max(number, self._least), self._most))

    def _has_settled(self, now: float, actors: int) -> bool:
        """Whether the row is about as many actors as there are. Among hundreds, some always come and go."""
        since, settled = self._settled
        if not actors or abs(actors - settled) > SURPLUS * settled:
            self._settled = since, _ = now, actors
            self._need, self._direction = None, 0
        return now >= since + SETTLE_SECONDS

    def _measure(self, now: float, row: Row) -> None:
        actors, stepping, training = row["actors"], 1 - row["cycle/hold"], 1 - row["learner_wait_fraction"]
        need = actors * max(stepping, 1 / FARTHEST) / max(training, 1 / FARTHEST)
        supply = row["steps_per_second"] / max(stepping, 1 / FARTHEST)
        weight = 1 - math.exp(-(now - self._looked) / SMOOTH_SECONDS) if self._need is not None else 1.0
        self._need = (self._need or 0.0) * (1 - weight) + weight * need
        self._supply = self._supply * (1 - weight) + weight * supply
        self._looked = now

    def _wanted(self, row: Row, bottleneck: str) -> int:
        """More while environments are the limit, fewer while the learner is; whatever else is would stay so."""
        actors: int = row["actors"]
        assert self._need is not None
        enough = math.ceil(AIM * self._need)
        if bottleneck == "env" and self.desired < (1 - BUSY_ENOUGH) * self._need and self._would_help(row):
            return max(self.desired, min(enough, FASTEST * actors))
        if bottleneck == "learner" and self.desired > (1 + SURPLUS) * self._need:
            return min(self.desired, enough)
        return self.desired

    def _would_help(self, row: Row) -> bool:
        if row["store_fill"] > FULL or row["policy_lag"] > STALE:
            return False
        before, supply = self._grown_from
        promised = row["actors"] / before - 1 if before else 0.0
        return promised < TELLING or self._supply > supply * (1 + WORTH * promised)

    def _consider(self, now: float, actors: int, wanted: int) -> None:
        """A change has to be wanted for a while. Down, it is the smallest that was wanted meanwhile."""
        direction = (wanted > self.desired) - (wanted < self.desired)
        if direction != self._direction:
            self._direction, self._since, self._candidate = direction, now, wanted
        self._candidate = wanted if direction > 0 else max(self._candidate, wanted)
        if direction and now >= self._since + (UP_SECONDS if direction > 0 else DOWN_SECONDS):
            self._grown_from = (actors, self._supply) if direction > 0 else (0, 0.0)
            self.desired, self._direction = self._candidate, 0
