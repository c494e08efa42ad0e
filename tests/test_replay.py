"""Replay memories beside slow models of them: which unrolls they know, how often each is drawn, which side waits."""

import math
import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

from bench.harness import rss_bytes
from seedrl.config import LearnerConfig
from seedrl.errors import ConfigError
from seedrl.monitoring.overview import replay_words
from seedrl.selection.base import Limits, Selector
from seedrl.selection.build import build_selector
from seedrl.selection.limiter import Limiter
from seedrl.selection.priority import Proportional, SumTree
from seedrl.selection.replay import Replay
from seedrl.selection.ring import Ring
from seedrl.selection.uniform import Uniform
from seedrl.validation import check


def make_ring(capacity: int, *, alpha: float | None = None, beta: float = 0.4, max_uses: int = 0) -> Ring:
    chooser = Uniform(capacity, seed=1) if alpha is None else Proportional(capacity, 1, alpha, lambda: beta)
    return Ring(capacity, capacity, chooser, max_uses)


def versions(count: int, version: int = 0) -> NDArray[np.int64]:
    return np.full(count, version, np.int64)


def filled(capacity: int, priority: NDArray[np.float32] | None, *, alpha: float | None, beta: float = 0.4) -> Ring:
    """Return a full ring from which some unrolls have left and come back, so that places are not in order."""
    ring = make_ring(capacity, alpha=alpha, beta=beta)
    ring.add(np.arange(capacity), versions(capacity))
    gone = ring.evict(capacity // 3, keep=0)
    ring.add(gone, versions(len(gone)))
    if priority is not None:
        ring.prefer(np.arange(capacity), priority)
    return ring


def chi_square(observed: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    return float(((observed - expected) ** 2 / expected).sum())


def critical(freedom: int) -> float:
    """Return what chi-square exceeds once in a thousand times (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


def counted(ring: Ring, picks: int, batch: int, capacity: int) -> NDArray[np.int64]:
    counts = np.zeros(capacity, np.int64)
    for _ in range(picks):
        entries = ring.choose(batch).entries
        ring.done(entries)
        np.add.at(counts, entries, 1)
    return counts


# The sum tree


@settings(max_examples=60, deadline=None)
@given(size=st.sampled_from([1, 3, 64, 65, 200, 5000]), seed=st.integers(0, 2**31), zeros=st.floats(0, 0.9))
def test_sum_tree_finds_what_a_running_sum_finds(size: int, seed: int, zeros: float) -> None:
    random = np.random.default_rng(seed)
    tree = SumTree(size)
    leaves = random.integers(1, 8, size).astype(np.float64) * (random.random(size) >= zeros)  # sums without rounding
    leaves[random.integers(size)] = 1.0
    tree.leaves[:] = leaves
    tree.update(np.arange(size))
    some = random.integers(0, size, 5)
    tree.leaves[some] = leaves[some] = 3.0
    tree.update(some)
    share = random.random(40)
    expected = np.searchsorted(leaves.cumsum(), share * leaves.sum(), side="right")
    assert tree.find(share).tolist() == expected.tolist()


def test_sum_tree_never_finds_a_leaf_without_mass_however_sums_are_rounded() -> None:
    random = np.random.default_rng(1)
    tree = SumTree(3000)
    tree.leaves[:2000] = random.random(2000) * 10.0 ** random.integers(-12, 6, 2000)
    tree.leaves[:2000:7] = 0.0
    tree.update(np.arange(3000))
    for share in (0.0, 1.0, 2.0, *np.nextafter(1.0, [0.0, 2.0])):
        assert tree.leaves[tree.find(np.array([share]))[0]] > 0
    found = tree.find(random.random(5000))
    assert (tree.leaves[found] > 0).all()


# How often unrolls are drawn


@pytest.mark.parametrize("capacity", [90, 300], ids=["few", "many"])  # each is drawn in its own way
def test_uniform_draws_every_unroll_equally_often_and_none_twice_in_a_batch(capacity: int) -> None:
    batch, picks = 10, 3000
    ring = filled(capacity, None, alpha=None)
    assert all(len(set(ring.choose(batch).entries.tolist())) == batch for _ in range(50))
    counts = counted(ring, picks, batch, capacity)
    expected = np.full(capacity, picks * batch / capacity)
    assert chi_square(counts, expected) < critical(capacity - 1)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
def test_proportional_draws_unrolls_by_their_priority_to_the_power_of_alpha(alpha: float) -> None:
    capacity, batch, picks = 90, 8, 4000
    priority = np.random.default_rng(2).uniform(0.1, 5.0, capacity).astype(np.float32)
    ring = filled(capacity, priority, alpha=alpha)
    counts = counted(ring, picks, batch, capacity)
    probability = priority.astype(np.float64) ** alpha / (priority.astype(np.float64) ** alpha).sum()
    assert chi_square(counts, picks * batch * probability) < critical(capacity - 1)


def test_chi_square_would_notice_another_alpha() -> None:
    capacity, batch, picks = 90, 8, 4000
    priority = np.random.default_rng(2).uniform(0.1, 5.0, capacity).astype(np.float32)
    counts = counted(filled(capacity, priority, alpha=1.0), picks, batch, capacity)
    probability = priority.astype(np.float64) ** 0.8 / (priority.astype(np.float64) ** 0.8).sum()
    assert chi_square(counts, picks * batch * probability) > critical(capacity - 1)


@pytest.mark.parametrize(("alpha", "beta"), [(0.6, 0.4), (1.0, 1.0), (0.7, 0.0)])
def test_importance_weights_are_those_of_a_direct_computation(alpha: float, beta: float) -> None:
    capacity = 50
    priority = np.random.default_rng(3).uniform(0.0, 3.0, capacity).astype(np.float32)
    ring = filled(capacity, priority, alpha=alpha, beta=beta)
    entries, weight = ring.choose(16)
    mass = np.maximum(priority.astype(np.float64), 1e-6) ** alpha
    direct = (capacity * mass[entries] / mass.sum()) ** -beta
    np.testing.assert_allclose(weight, direct / direct.max(), rtol=1e-6)


def test_new_unrolls_have_the_priority_they_are_given_or_else_the_highest_so_far() -> None:
    ring = make_ring(8, alpha=1.0)
    ring.add(np.array([0, 1, 2]), versions(3), np.array([0.5, 7.0, np.nan], np.float32))
    ring.add(np.array([3]), versions(1))
    assert ring.arrays()["mass"].tolist() == [0.5, 7.0, 7.0, 7.0]


def test_priorities_that_are_not_numbers_or_of_unrolls_that_left_are_ignored() -> None:
    ring = make_ring(4, alpha=1.0)
    ring.add(np.arange(3), versions(3), np.array([1.0, 2.0, 3.0], np.float32))
    ring.evict(1, keep=0)
    ring.prefer(np.array([0, 1, 2]), np.array([9.0, np.inf, -1.0], np.float32))
    assert ring.arrays()["mass"].tolist() == [2.0, 3.0]


# The ring beside lists


class RingMachine(RuleBasedStateMachine):
    """A ring beside a list, under any order of adding, picking, evicting and dropping."""

    CAPACITY = 12

    @initialize(max_uses=st.integers(0, 3), alpha=st.sampled_from([None, 0.7]))
    def begin(self, max_uses: int, alpha: float | None) -> None:
        self.max_uses = max_uses
        self.ring = make_ring(self.CAPACITY, alpha=alpha, max_uses=max_uses)
        self.free = list(range(self.CAPACITY))
        self.model: list[int] = []  # entries, oldest first
        self.version: dict[int, int] = {}
        self.uses: Counter[int] = Counter()
        self.picked: list[int] = []
        self.left: list[int] = []  # entries without an unroll that are not given back yet
        self.now = 0
        self.dropped: Counter[str] = Counter()

    def leave(self, entries: list[int]) -> None:
        for entry in entries:
            self.model.remove(entry)
            del self.version[entry], self.uses[entry]
        self.left += entries

    def get_back(self, entries: list[int]) -> None:
        assert sorted(entries) == sorted(self.left)
        self.free += entries
        self.left = []

    @rule(count=st.integers(1, 4), passed=st.integers(0, 2))
    def add(self, count: int, passed: int) -> None:
        self.now += passed
        entries = [self.free.pop() for _ in range(min(count, len(self.free)))]
        self.ring.add(np.array(entries, np.int64), versions(len(entries), self.now))
        self.model += entries
        self.version |= dict.fromkeys(entries, self.now)

    @precondition(lambda self: len(self.model) >= 3 and not self.picked)
    @rule()
    def pick(self) -> None:
        entries = self.ring.choose(3).entries.tolist()
        assert set(entries) <= set(self.model)
        self.uses.update(set(entries))
        self.picked = entries

    @precondition(lambda self: self.picked)
    @rule()
    def done(self) -> None:
        entries, self.picked = self.picked, []
        freed = self.ring.done(np.array(entries)).tolist()
        self.leave(list({entry for entry in entries if self.max_uses and self.uses[entry] >= self.max_uses}))
        self.get_back(freed)

    @rule(count=st.integers(0, 5), keep=st.integers(0, 4))
    def evict(self, count: int, keep: int) -> None:
        idle = [entry for entry in self.model if entry not in self.picked]
        expected = idle[: max(0, min(count - len(self.left), len(self.model) - keep))]
        self.dropped["unused"] += sum(not self.uses[entry] for entry in expected)
        self.leave(expected)
        self.get_back(self.ring.evict(count, keep).tolist())

    @precondition(lambda self: self.free)
    @rule()
    def reject(self) -> None:
        entry = self.free.pop()
        self.ring.reject(np.array([entry]))
        self.dropped["stale"] += 1
        self.left.append(entry)

    @rule(age=st.integers(0, 4))
    def drop_older(self, age: int) -> None:
        expected = []
        for entry in self.model:
            if self.version[entry] >= self.now - age or entry in self.picked:
                break
            expected.append(entry)
        self.dropped["stale"] += len(expected)
        self.ring.drop_older(self.now - age)
        self.leave(expected)

    @precondition(lambda self: not self.picked)
    @rule()
    def restore(self) -> None:
        """A ring that is loaded from the arrays of another draws the same from then on."""
        other = make_ring(self.CAPACITY, alpha=0.7 if self.ring.arrays().get("chooser.highest") is not None else None)
        other.load(self.ring.known(), self.ring.arrays())
        for name, array in self.ring.arrays().items():
            np.testing.assert_array_equal(other.arrays()[name], array)
        if len(self.model) >= 3:
            self.pick()
            assert other.choose(3).entries.tolist() == self.picked

    @invariant()
    def knows_the_same(self) -> None:
        if hasattr(self, "ring"):
            assert self.ring.known().tolist() == self.model
            assert self.ring.arrays()["uses"].tolist() == [self.uses[entry] for entry in self.model]

    def teardown(self) -> None:
        if hasattr(self, "ring"):
            taken = Counter(self.ring.take_dropped())
            assert +taken == +self.dropped


TestRing = RingMachine.TestCase
TestRing.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


# The limiter


LIMITS = {
    "batch": st.integers(1, 12),
    "ratio": st.sampled_from([0.25, 0.5, 1.0, 1.5, 8.0, 32.0]),
    "slack": st.floats(0, 20),
    "size": st.integers(0, 40),
}


@settings(max_examples=150, deadline=None)
@given(moves=st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=120), **LIMITS)
def test_limiter_keeps_samples_per_insert_in_its_band_and_never_blocks_both_sides(
    moves: list[tuple[bool, int]], batch: int, ratio: float, slack: float, size: int
) -> None:
    """Whatever wants to move, a slow model counts the same; `inserts` are those after the memory was filled."""
    tolerance = (batch + ratio) / 2 + slack
    limiter = Limiter(batch, size, ratio, tolerance)
    held = inserts = samples = 0
    for is_actor, count in moves:
        limits = limiter.limits
        assert not (limits.learner and limits.actors)
        if is_actor:
            allowed = limiter.may_insert(count)
            if held >= max(size, batch):
                room = [n for n in range(count + 1) if (inserts + n) * ratio - samples <= tolerance]
                assert allowed == max(room, default=0)
                inserts += allowed
            else:
                assert allowed == count
            held += allowed
            limiter.inserted(allowed, held)
        else:
            allowed_now = held >= max(size, batch) and inserts * ratio - samples - batch >= -tolerance
            assert limiter.may_sample(batch) == allowed_now
            if allowed_now:
                samples += batch
                limiter.sampled(batch)
        assert abs(inserts * ratio - samples) <= tolerance + 1e-6


def test_limiter_without_a_ratio_holds_nothing_back_once_there_is_enough() -> None:
    limiter = Limiter(batch_size=4, min_size=10, samples_per_insert=0.0, tolerance=0.0)
    limiter.inserted(9, size=9)
    assert limiter.limits == Limits(learner="store.min_size")
    limiter.inserted(1, size=10)
    assert limiter.limits == Limits()
    assert limiter.may_insert(1000) == 1000
    assert limiter.may_sample(1000)


def test_limiter_names_the_setting_that_holds_each_side_back() -> None:
    limiter = Limiter(batch_size=4, min_size=4, samples_per_insert=1.0, tolerance=3.0)
    limiter.inserted(4, size=4)
    limiter.inserted(3, size=7)
    assert limiter.limits == Limits(actors="store.samples_per_insert")
    limiter.sampled(4)
    assert limiter.limits == Limits(learner="store.samples_per_insert")


# A whole replay memory


def replay_config(**store: object) -> LearnerConfig:
    config = LearnerConfig()
    config.algorithm.batch_size = 4
    config.store.select = "uniform"
    for name, value in store.items():
        setattr(config.store, name, value)
    return config


@settings(max_examples=80, deadline=None)
@given(
    select=st.sampled_from(["uniform", "priority", "mixed"]),
    capacity=st.integers(5, 24),
    min_size=st.integers(0, 24),
    samples_per_insert=st.sampled_from([0.0, 0.5, 1.0, 4.0]),
    tolerance=st.sampled_from([0.0, 2.5, 4.0, 30.0]),
    max_uses=st.integers(0, 5),
    max_staleness=st.integers(0, 3),
    replay_share=st.sampled_from([0.0, 0.25, 0.5, 0.75]),
    seed=st.integers(0, 2**31),
)
def test_memory_with_settings_that_pass_validation_never_stops_both_sides(seed: int, **store: object) -> None:
    """One side may be as slow as it likes, and unrolls may be of any age: there is always one that can continue.

    Six slots finish their unrolls whenever they like, and an unroll is never in two hands.
    """
    config = replay_config(**store)
    try:
        check(config)
    except ConfigError:
        assume(False)
    random, updates = np.random.default_rng(seed), 0
    selector = build_selector(config, updates=lambda: updates)
    free, waits = list(range(config.store.capacity)), 0
    for _ in range(300):
        moved = False
        if random.random() < 0.5:
            moved = write(selector, free, int(random.integers(1, 7)), max(0, updates - int(random.integers(0, 2))))
        elif selector.can_pick(4):
            entries = selector.pick(4).entries
            assert not set(entries.tolist()) & set(free)
            free += selector.done(entries).tolist()
            updates, moved = updates + 1, True
        waits = 0 if moved else waits + 1
        assert len(set(free)) == len(free)
        assert waits < 60, (selector.limits(), config.store)  # 2^-59 if either side can continue


def write(selector: Selector, free: list[int], count: int, version: int) -> bool:
    """Add up to `count` unrolls as the store does; return whether any could be."""
    count = selector.may_add(count)
    if count > len(free):
        free += selector.evict(count - len(free)).tolist()
    entries = np.array([free.pop() for _ in range(min(count, len(free)))], np.int64)
    selector.add(entries, versions(len(entries), version))
    return len(entries) > 0


def test_memory_drops_stale_unrolls_when_they_come_and_before_they_are_picked() -> None:
    updates = 0
    selector = build_selector(replay_config(capacity=20, max_staleness=5), updates=lambda: updates)
    selector.add(np.arange(6), versions(6))
    assert selector.can_pick(4)
    updates = 6
    selector.add(np.array([6, 7]), np.array([0, 1]))
    assert not selector.can_pick(4)
    assert len(selector) == 1
    assert selector.take_dropped() == {"stale": 7}
    assert sorted(selector.evict(1).tolist()) == [0, 1, 2, 3, 4, 5, 6]


def test_memory_frees_unrolls_that_were_used_often_enough() -> None:
    selector = build_selector(replay_config(capacity=8, max_uses=2))
    selector.add(np.arange(4), versions(4))
    assert selector.done(selector.pick(4).entries).tolist() == []
    assert sorted(selector.done(selector.pick(4).entries).tolist()) == [0, 1, 2, 3]
    assert not selector.can_pick(4)


def test_memory_keeps_a_train_batch_whatever_the_writer_needs() -> None:
    """What `can_pick` has promised the learner holds until it picks."""
    selector = build_selector(replay_config(capacity=6))
    selector.add(np.arange(6), versions(6))
    assert selector.can_pick(4)
    assert selector.evict(6).tolist() == [0, 1]
    assert selector.can_pick(4)


def test_beta_follows_its_schedule() -> None:
    config = replay_config(select="priority", capacity=8)
    config.store.priority.alpha, config.store.priority.beta, config.store.priority.beta_end = 1.0, 0.0, 1.0
    fraction = 0.0
    selector = build_selector(config, fraction=lambda: fraction)
    selector.add(np.arange(8), versions(8), np.arange(1, 9, dtype=np.float32))
    assert set(selector.pick(4).weight.tolist()) == {1.0}
    fraction = 3.0
    entries, weight = selector.pick(4)
    np.testing.assert_allclose(weight, (1 / (entries + 1)) / (1 / (entries + 1)).max(), rtol=1e-6)


@pytest.mark.parametrize(
    ("store", "words"),
    [
        ({"select": "fifo", "max_uses": 2}, r"store.max_uses=2 has no meaning with store.select=fifo"),
        ({"capacity": 4}, r"store.capacity=4 has to be more than algorithm.batch_size=4"),
        ({"capacity": 8, "min_size": 9}, r"store.min_size=9 is more than store.capacity=8"),
        ({"samples_per_insert": 3.0, "max_uses": 2}, r"samples_per_insert=3 is more than store.max_uses=2"),
        ({"samples_per_insert": 2.0, "tolerance": 2.9}, r"store.tolerance=2.9 .* at least 3"),
        ({"select": "mixed", "min_size": 8}, r"store.min_size=8 has no meaning with store.select=mixed"),
        ({"select": "mixed", "replay_share": 0.9}, r"replay_share=0.9 leaves no new unroll"),
        ({"select": "lifo"}, r"store.select=lifo is none of fifo, uniform, priority, mixed"),
        ({"max_staleness": -1}, r"store.max_staleness=-1 must be finite and not negative"),
    ],
)
def test_settings_of_replay_that_cannot_work_are_refused(store: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(replay_config(**store))


def test_lockstep_needs_a_ratio_because_a_memory_never_runs_out() -> None:
    config = replay_config()
    config.lockstep, config.actors.groups = True, 1
    with pytest.raises(ConfigError, match=r"lockstep=true with store.select=uniform needs store.samples_per_insert"):
        check(config)


# New and old together


def test_mixed_trains_on_every_unroll_once_as_a_new_one_and_fills_up_with_old_ones() -> None:
    selector = build_selector(replay_config(select="mixed", capacity=40, replay_share=0.5))
    free, seen = list(range(40)), Counter[int]()
    for turn in range(12):
        count = 4 if not turn else 2
        assert not selector.can_pick(4)
        entries = np.array([free.pop(0) for _ in range(count)])
        selector.add(entries, versions(count))
        picked = selector.pick(4).entries
        assert picked[:count].tolist() == entries.tolist()
        assert not set(picked[count:].tolist()) & set(entries.tolist())
        seen.update(picked.tolist())
        assert selector.done(picked).tolist() == []
    assert sum(seen.values()) == 48
    assert len(selector) == 26


def test_mixed_holds_actors_back_while_new_unrolls_wait() -> None:
    selector = build_selector(replay_config(select="mixed", capacity=40))
    assert selector.may_add(30) == 8
    selector.add(np.arange(8), versions(8))
    assert selector.may_add(1) == 0


def test_replay_is_built_by_name() -> None:
    assert isinstance(build_selector(replay_config()), Replay)


def test_status_tells_which_side_the_limiter_holds_back() -> None:
    row = {"store_fill": 0.5, "replayed": 3.96, "limit/filling": 0.0, "limit/learner": 0.8, "limit/actors": 0.0}
    assert replay_words(row) == "replay: store 50% full, 4.0 samples per insert; the learner waits 80% of the time"


@pytest.mark.long
@pytest.mark.parametrize("select", ["uniform", "priority"])
def test_a_million_inserts_take_no_more_memory_than_the_first_hundred_thousand(select: str) -> None:
    config = replay_config(select=select, capacity=20_000, max_uses=50, max_staleness=3000)
    config.algorithm.batch_size = 64
    updates = 0
    selector = build_selector(config, updates=lambda: updates)
    free, sizes = list(range(20_000)), []
    for turn in range(10**6 // 50):
        write(selector, free, 50, updates)
        if selector.can_pick(64):
            picked = selector.pick(64)
            free += selector.done(picked.entries).tolist()
            selector.prefer(picked.entries, picked.weight)
            updates += 1
        if turn % 2000 == 1999:
            selector.take_dropped()
            sizes.append(rss_bytes(os.getpid()))
    assert sizes[-1] < sizes[0] + 2 * 2**20, sizes


def test_mixed_keeps_the_old_unrolls_of_a_train_batch_whatever_the_writer_needs() -> None:
    selector = build_selector(replay_config(select="mixed", capacity=8))
    selector.add(np.arange(4), versions(4))
    assert selector.done(selector.pick(4).entries).tolist() == []
    selector.add(np.arange(4, 6), versions(2))
    assert selector.can_pick(4)
    assert selector.evict(8).tolist() == [0, 1]
    assert selector.can_pick(4)
