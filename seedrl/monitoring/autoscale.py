"""The number of actors that the learner could use, from which side waits. Pure: time is that of the rows it is given.

Acting and training are coupled: the store lets the learner train on each unroll a certain number of times (once in a
queue, more often with several passes or with replay), and holds serving back once the learner is behind. So one of two
shares is next to nothing: either the learner waits for unrolls, or actors are held back.

    demand   steps that the learner would consume if it never waited      acted / (1 - wait)
    supply   steps of one actor that is never held back                   acted / (actors × (1 - hold))

The number of actors needed is demand / supply = actors × (1 - hold) / (1 - wait). How often an unroll is trained on
does not appear in it, nor does the fill of the store, which is always full with replay. This module knows nothing of
what starts actors: a supervisor, Ray or Kubernetes may follow the number, or nothing does.
"""

import math

from seedrl.config import LearnerConfig
from seedrl.monitoring.diagnosis import BUSY_ENOUGH
from seedrl.monitoring.sampler import Row
from seedrl.sizes import serving_ranks

SETTLE_SECONDS = 8.0  # after actors joined or left: a row covers five seconds, and environments begin slowly
SMOOTH_SECONDS = 10.0  # the time constant of the average over rows
UP_SECONDS, DOWN_SECONDS = 5.0, 30.0  # how long a need has to last: a learner that waits costs more than a spare actor
SURPLUS = 0.1  # the share of actors that may be too many
AIM = 0.95  # of what is needed: the last actor is not started for a twentieth of its steps
FASTEST = 2  # the factor of growth in one step; the supply is known only for the actors that are there
FARTHEST = 4.0  # the largest factor by which a need is believed to differ from what is there
STALE = 20.0  # the policy lag beyond which more actors would only make more data that is too old
REPLAYED = 1.5  # times that an unroll is taken from the store: beyond, old data is intended and the lag is no sign
WORTH = 0.3  # the share of the promised supply that has to come, or the machines have no more cores to give
TELLING = 0.15  # growth by less than this share is too little to judge by


class Autoscaler:
    """The number of actors that the learner could use. Owned by the main thread."""

    def __init__(self, config: LearnerConfig, before: int = 0) -> None:
        """`before` is what the previous process of the run wanted; 0 if there was none."""
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
        self._measured = 0.0  # when
        self._direction, self._since = 0, 0.0  # of the change that is wanted, and since when
        self._candidate = self.desired

    def update(self, row: Row, bottleneck: str) -> int:
        """Return the number after another row. It stays where nothing can be measured."""
        now, actors = row["seconds"], row["actors"]
        if self._has_settled(now, actors) and row["steps_per_second"] > 0 and row["updates_per_second"] > 0:
            self._measure(now, row)
            self._consider(now, actors, self._bounded(self._wanted(row, bottleneck)))
        return self.desired

    def _bounded(self, number: int) -> int:
        return int(min(max(number, self._least), self._most))

    def _has_settled(self, now: float, actors: int) -> bool:
        """Return whether the row is about as many actors as there are. Among hundreds, some always come and go."""
        since, settled = self._settled
        if not actors or abs(actors - settled) > SURPLUS * settled:
            self._settled = since, _ = now, actors
            self._need, self._direction = None, 0
        return now >= since + SETTLE_SECONDS

    def _measure(self, now: float, row: Row) -> None:
        actors, stepping, training = row["actors"], 1 - row["cycle/hold"], 1 - row["learner_wait_fraction"]
        need = actors * max(stepping, 1 / FARTHEST) / max(training, 1 / FARTHEST)
        supply = row["steps_per_second"] / max(stepping, 1 / FARTHEST)
        weight = 1 - math.exp(-(now - self._measured) / SMOOTH_SECONDS) if self._need is not None else 1.0
        self._need = (self._need or 0.0) * (1 - weight) + weight * need
        self._supply = self._supply * (1 - weight) + weight * supply
        self._measured = now

    def _wanted(self, row: Row, bottleneck: str) -> int:
        """Want more while environments are the limit and fewer while the learner is; other limits would stay."""
        actors: int = row["actors"]
        assert self._need is not None
        enough = math.ceil(AIM * self._need)
        if bottleneck == "env" and self.desired < (1 - BUSY_ENOUGH) * self._need and self._would_help(row):
            return max(self.desired, min(enough, FASTEST * actors))
        if bottleneck == "learner" and self.desired > (1 + SURPLUS) * self._need:
            return min(self.desired, enough)
        return self.desired

    def _would_help(self, row: Row) -> bool:
        """Return whether more actors would add steps that are worth training on."""
        if row["policy_lag"] > STALE and row["replayed"] <= REPLAYED:
            return False
        before, supply = self._grown_from
        promised = row["actors"] / before - 1 if before else 0.0
        return promised < TELLING or self._supply > supply * (1 + WORTH * promised)

    def _consider(self, now: float, actors: int, wanted: int) -> None:
        """Change the number if that was wanted for a while; downwards to the largest number wanted meanwhile."""
        direction = (wanted > self.desired) - (wanted < self.desired)
        if direction != self._direction:
            self._direction, self._since, self._candidate = direction, now, wanted
        self._candidate = wanted if direction > 0 else max(self._candidate, wanted)
        if direction and now >= self._since + (UP_SECONDS if direction > 0 else DOWN_SECONDS):
            self._grown_from = (actors, self._supply) if direction > 0 else (0, 0.0)
            self.desired, self._direction = self._candidate, 0
