"""How many actors the learner could use: the real code in a closed loop with a model of actors, store and learner.

The loop turns as in a run: every half second a row over the last ten looks is judged, and whoever follows the number
starts actors, which take some seconds until they step, or ends them. Time is the model's own.
"""

import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from seedrl.config import LearnerConfig
from seedrl.monitoring.autoscale import DOWN_SECONDS, Autoscaler
from seedrl.monitoring.diagnosis import diagnose
from seedrl.monitoring.sampler import Row

LOOK = 0.5  # seconds
LOOKS = 10  # that a row covers
STEPS = 100.0  # per second, of an actor that is not held back


class Load:
    """Actors that step, a store that fills and empties, a learner that trains: as much flows as the slowest lets.

    `capacity` is what the learner could train, `served` what inference could answer, `cores` what all environments
    together could step, each in steps per second.
    """

    def __init__(
        self,
        capacity: float,
        actors: int = 1,
        at_most: int = 0,
        count: int = 1,
        noise: float = 0.0,
        start_up: float = 4.0,
        served: float = 1e9,
        cores: float = 1e9,
        follow: bool = True,
        before: int = 0,
    ) -> None:
        self.config = LearnerConfig()
        self.config.actors.count, self.config.actors.at_most = count, at_most
        self.config.serving.max_slots = 100_000
        self.autoscaler = Autoscaler(self.config, before)
        self.capacity, self.served, self.cores, self.noise = capacity, served, cores, noise
        self.start_up, self.follow = start_up, follow
        self.now = 0.0
        self.lag, self.replayed = 1.0, 1.0
        self.begins = [0.0] * actors  # when each actor joins
        self.history: list[int] = []  # the number after each look
        self._random = random.Random(7)
        self._store, self._room = 0.0, max(640.0, 0.5 * capacity)  # steps: two train batches, or half a second
        self._window: deque[dict[str, float]] = deque(maxlen=LOOKS)
        self._updates = 0

    @property
    def joined(self) -> int:
        return sum(begins <= self.now for begins in self.begins)

    def run(self, seconds: float) -> "Load":
        for _ in range(round(seconds / LOOK)):
            self.now += LOOK
            self._window.append(self._flow())
            row = self.row()
            self.history.append(self.autoscaler.update(row, diagnose(row, self.config).bottleneck))
            if self.follow and self.now % 2 == 0:
                self._follow(self.history[-1])
        return self

    def row(self) -> Row:
        parts = {name: sum(look[name] for look in self._window) / len(self._window) for name in self._window[0]}
        shares = {f"cycle/{part}": 0.0 for part in ("network", "fill")} | {"learner/backward": 0.9}
        zeros = dict.fromkeys(("round_trip_seconds", "act_latency_seconds", "inference_batch", "serving/forward"), 0.0)
        return {
            **{
                "seconds": self.now,
                "actors": self.joined,
                "paused_actors": 0,
                "updates": self._updates,
                "policy_lag": self.lag,
            },
            **shares | parts | zeros,
            "replayed": self.replayed,
        }

    def _flow(self) -> dict[str, float]:
        """One look's worth of steps."""
        stepped = min(self._noisy(STEPS) * sum(begins + 1 <= self.now for begins in self.begins), self.cores)
        ready = min(stepped, self.served)
        capacity = self._noisy(self.capacity)
        acted = min(ready * LOOK, self._room - self._store + capacity * LOOK)
        trained = min(capacity * LOOK, self._store + acted)
        self._store = min(self._room, self._store + acted - trained)
        self._updates += trained > 0
        hold = 1 - acted / (ready * LOOK) if ready else 0.0
        in_inference = (1 - hold) * (1 - ready / stepped) if stepped else 0.0
        return {
            "steps_per_second": acted / LOOK,
            "updates_per_second": trained / LOOK / 320,
            "learner_wait_fraction": 1 - trained / (capacity * LOOK) if capacity else 0.0,
            "cycle/hold": hold,
            "cycle/inference": in_inference,
            "cycle/env": 1 - hold - in_inference,
        }

    def _noisy(self, mean: float) -> float:
        return mean * max(0.1, self._random.gauss(1.0, self.noise))

    def _follow(self, wanted: int) -> None:
        while len(self.begins) > wanted:
            self.begins.pop()
        while len(self.begins) < wanted:
            self.begins.append(self.now + self.start_up * self._random.uniform(0.8, 1.2))

    @property
    def changes(self) -> list[int]:
        """The number without repeats, from the beginning on."""
        return [number for number, _ in itertools.groupby(self.history)]

    @property
    def turns(self) -> int:
        """How often it changed its direction."""
        steps = [after > before for before, after in itertools.pairwise(self.changes)]
        return sum(before != after for before, after in itertools.pairwise(steps))


@pytest.mark.parametrize("noise", [0.0, pytest.param(0.1, marks=pytest.mark.long), 0.2])
@pytest.mark.parametrize("needed", [1, 2, 3, 7, 40, 300])
@pytest.mark.parametrize("first", [1, 30, 600])
def test_autoscaler_converges_from_below_and_above_and_stays(needed: int, first: int, noise: float) -> None:
    load = Load(capacity=needed * STEPS, actors=first, noise=noise, before=first).run(400)
    assert 0.88 * needed <= load.autoscaler.desired <= max(1.13 * needed, needed + bool(noise))
    assert load.turns <= 1
    settled = len(load.changes)
    load.run(1800)
    assert len(load.changes) <= settled + 1, f"{load.changes}"
    assert load.turns <= 1


@pytest.mark.parametrize("start_up", [0.5, 5.0, 20.0, 60.0])
def test_autoscaler_with_slow_starters_does_not_ask_for_more_and_more(start_up: float) -> None:
    load = Load(capacity=6 * STEPS, start_up=start_up, noise=0.1).run(600)
    assert load.autoscaler.desired == 6
    assert max(load.history) == 6
    assert load.turns == 0


def test_autoscaler_follows_a_change_of_capacity_up_quickly_and_down_slowly() -> None:
    load = Load(capacity=4 * STEPS, noise=0.1).run(120)
    assert load.autoscaler.desired == 4
    load.capacity, began = 12 * STEPS, load.now
    while load.autoscaler.desired < 8:
        load.run(LOOK)
    assert load.now - began < 20
    load.run(120)
    assert 11 <= load.autoscaler.desired <= 12
    load.capacity, began = 4 * STEPS, load.now
    while load.autoscaler.desired > 6:
        load.run(LOOK)
    assert DOWN_SECONDS < load.now - began < 3 * DOWN_SECONDS
    load.run(300)
    assert load.autoscaler.desired in (4, 5)
    assert load.turns == 1


def test_autoscaler_of_a_capacity_that_swings_faster_than_patience_does_not_shrink() -> None:
    """This happens with checkpoints, or with a learner that shares its machine: ten seconds fast, ten seconds slow."""
    load = Load(capacity=4 * STEPS).run(100)
    for _ in range(30):
        load.capacity = 2 * STEPS
        load.run(10)
        load.capacity = 4 * STEPS
        load.run(10)
    assert load.turns == 0


@pytest.mark.parametrize(("capacity", "expected"), [(100 * STEPS, 5), (0.2 * STEPS, 2), (3 * STEPS, 3)])
def test_autoscaler_stays_within_count_and_at_most(capacity: float, expected: int) -> None:
    load = Load(capacity, actors=2, count=2, at_most=5).run(600)
    assert load.autoscaler.desired == expected
    assert all(2 <= number <= 5 for number in load.history)


def test_autoscaler_is_never_more_than_there_are_slots_for() -> None:
    load = Load(capacity=100 * STEPS)
    load.config.serving.max_slots = 10 * load.config.actors.envs
    load.autoscaler = Autoscaler(load.config)
    assert load.run(600).autoscaler.desired == 10


@pytest.mark.parametrize("ranks", [{"count": 4}, {"count": 2, "separate": True}])
def test_autoscaler_of_several_ranks_is_for_the_share_of_one(ranks: dict[str, Any]) -> None:
    load = Load(capacity=100 * STEPS, count=4, at_most=16)
    for name, value in ranks.items():
        setattr(load.config.ranks, name, value)
    load.autoscaler = Autoscaler(load.config)
    seen = load.autoscaler.desired, load.run(600).autoscaler.desired
    assert seen == ((4, 16) if "separate" in ranks else (1, 4))


@pytest.mark.parametrize("served", [1.2, 0.6])
def test_autoscaler_does_not_grow_while_inference_is_the_limit(served: float) -> None:
    """Three actors, of which inference can answer two fifths or one: most of a cycle is spent there."""
    load = Load(capacity=10 * STEPS, actors=3, before=3, served=served * STEPS, noise=0.1).run(600)
    assert load.changes == [3]


def test_autoscaler_does_not_grow_on_and_on_where_the_cores_are_all_taken() -> None:
    """More actors share what there is: the environments stay the limit, and nothing is gained."""
    load = Load(capacity=20 * STEPS, cores=2 * STEPS, noise=0.05).run(1800)
    assert load.autoscaler.desired <= 4
    assert load.turns == 0
    load.cores = 1e9  # other machines have come
    assert load.run(600).autoscaler.desired >= 18


def test_autoscaler_grows_no_more_once_what_is_trained_on_is_too_old() -> None:
    load = Load(capacity=20 * STEPS)
    load.lag = 50.0
    assert load.run(300).autoscaler.desired == 1


@pytest.mark.parametrize("needed", [2, 7])
@pytest.mark.parametrize("first", [1, 30])
def test_autoscaler_with_replay_follows_who_waits_although_the_data_is_old(needed: int, first: int) -> None:
    """A ring of old unrolls is always full, and each is used many times; a limiter couples acting and training."""
    load = Load(capacity=needed * STEPS, actors=first, noise=0.1, before=first)
    load.lag, load.replayed = 500.0, 8.0
    assert needed <= load.run(400).autoscaler.desired <= needed + 1
    assert load.turns <= 1


@pytest.mark.parametrize("silent", ["nobody connected", "nobody steps", "no update"])
def test_autoscaler_without_anything_to_measure_stays(silent: str) -> None:
    load = Load(capacity=4 * STEPS, actors=8, before=8).run(5)
    load.follow = False
    if silent == "nobody connected":
        load.begins = [1e9] * 8
    elif silent == "nobody steps":
        load.cores = 0.0
    else:
        load.capacity = 0.0
    assert set(load.run(600).history) == {8}


def test_autoscaler_of_a_restarted_learner_begins_where_it_was() -> None:
    load = Load(capacity=4 * STEPS).run(120)
    again = Load(capacity=4 * STEPS, actors=0, before=load.autoscaler.desired, start_up=10).run(120)
    assert again.changes == [4]


def test_autoscaler_that_nobody_follows_asks_for_no_more_than_twice_what_is_there() -> None:
    load = Load(capacity=40 * STEPS, actors=3, follow=False, noise=0.1).run(600)
    assert load.autoscaler.desired == 6
    assert load.turns == 0


def kubernetes(load: Load, seconds: float) -> None:
    """As Kubernetes has it: looks every 15 s, goes up at once and down to the largest number of the last minutes."""
    load.follow = False
    for _ in range(round(seconds / 15)):
        load.run(15)
        load._follow(max(load.history[-600:]))


@pytest.mark.parametrize("follower", [kubernetes, lambda load, seconds: load.run(seconds)])
def test_autoscaler_converges_whoever_follows_it(follower: Callable[[Load, float], Any]) -> None:
    load = Load(capacity=9 * STEPS, noise=0.15, start_up=20)
    follower(load, 900)
    assert 8 <= len(load.begins) <= 10
    load.capacity = 3 * STEPS
    follower(load, 900)
    assert 3 <= len(load.begins) <= 4
    assert load.turns == 1


def test_autoscaler_stays_if_neither_side_waits_because_a_memory_is_always_full() -> None:
    """With replay and no ratio the learner never waits and actors are never held back: more of them change nothing."""
    load = Load(capacity=1e9, actors=3, before=3, at_most=50)
    load.replayed = 40.0
    row = {"learner_wait_fraction": 0.0, "cycle/hold": 0.0, "cycle/env": 1.0, "limit/learner": 0.0, "limit/actors": 0.0}
    load._flow = lambda: {**row, "cycle/inference": 0.0, "steps_per_second": 300.0, "updates_per_second": 9.0}  # type: ignore[method-assign]
    load._updates = 1
    assert set(load.run(120).history) == {3}
