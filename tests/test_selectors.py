"""Selectors and what the store promises them: identity, back-pressure, reuse, and rows shared between unrolls."""

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from seedrl.config import LearnerConfig
from seedrl.errors import ConfigError
from seedrl.rows import RESET
from seedrl.selection.base import Entries, Pick, Priority, Selector
from seedrl.selection.build import build_selector
from seedrl.selection.fifo import Fifo, Fresh
from seedrl.store import Store, StoreSizes
from seedrl.types import Recorded, Ticket
from tests.builders import record
from tests.fakes import FakePool, TinyModel, make_job, make_spec
from tests.rig import CPU, Rig, make_model, make_rows

CAPACITY = 6


class Ring(Selector):
    """A replay memory as users would write it: the newest unrolls, any of them again and again."""

    def __init__(self, capacity: int = 0, batch_size: int = 0, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._known: list[int] = []  # oldest first
        self._picked: set[int] = set()
        self.priority: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, entries: Entries, versions: Entries, priority: Priority | None = None) -> None:
        self._known.extend(entries.tolist())

    def can_pick(self, count: int) -> bool:
        return len(self._known) >= count

    def pick(self, count: int) -> Pick:
        entries = self._random.choice(self._known, count, replace=False)
        self._picked.update(entries.tolist())
        return Pick(entries, np.full(count, 0.5, np.float32))

    def done(self, entries: Entries) -> Entries:
        self._picked.difference_update(entries.tolist())
        return np.empty(0, np.int64)

    def evict(self, count: int) -> Entries:
        oldest = [entry for entry in self._known if entry not in self._picked][:count]
        self._known = [entry for entry in self._known if entry not in oldest]
        return np.array(oldest, np.int64)

    def prefer(self, entries: Entries, priority: Priority) -> None:
        self.priority.update(zip(entries.tolist(), priority.tolist(), strict=True))


def make_store(selector: Fifo | Ring, capacity: int = CAPACITY) -> Store:
    return Store(make_spec(), selector, StoreSizes(1, capacity, unroll_length=2, frame_stack=1, core_size=0), CPU)


def test_build_selector_by_name_and_by_import_path() -> None:
    config = LearnerConfig()
    assert isinstance(build_selector(config), Fifo)
    config.store.select = f"{__name__}:Ring"
    assert isinstance(build_selector(config), Ring)


class Old:
    """A selector that lacks most of its methods."""

    def __init__(self, capacity: int, batch_size: int, seed: int) -> None:
        self.add = print


class Alone(Old):
    """A selector that has only what each needs of its own."""

    can_pick = pick = done = evict = prefer = print


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tests.nowhere:Ring", "store.select=tests.nowhere:Ring"),
        (f"{__name__}:Old", "has no can_pick, pick, done, evict, prefer; seedrl/selection/base.py explains each"),
        (f"{__name__}:Alone", "does not derive from seedrl.selection.base.Selector"),
    ],
)
def test_build_selector_that_is_not_there_or_not_whole_is_refused_by_name(name: str, words: str) -> None:
    config = LearnerConfig()
    config.store.select = name
    with pytest.raises(ConfigError, match=words):
        build_selector(config)


def test_fifo_evicts_nothing_so_a_full_store_gives_no_entry() -> None:
    store = make_store(Fifo())
    store.commit(store.reserve(CAPACITY))
    assert len(store.reserve(1)) == 0


def test_ring_evicts_the_oldest_and_trains_on_unrolls_again() -> None:
    store = make_store(Ring())
    first = np.sort(store.reserve(CAPACITY))
    store.commit(first)
    for _ in range(3):
        assert store.take(CAPACITY, timeout=0) is not None
    assert store.ready == CAPACITY
    assert sorted(store.reserve(2).tolist()) == first[:2].tolist()


def test_take_carries_the_importance_weights_of_the_selector() -> None:
    store = make_store(Ring())
    store.commit(store.reserve(3))
    unrolls = store.take(3, timeout=0)
    assert unrolls is not None
    assert unrolls.weight.tolist() == [0.5] * 3


def test_commit_hands_over_the_last_policy_version_and_the_priority_that_follows_from_what_was_recorded() -> None:
    class Noting(Fifo):
        def add(self, entries: Entries, versions: Entries, priority: Priority | None = None) -> None:
            super().add(entries, versions, priority)
            self.seen = versions, priority

    def initial_priority(recorded: Recorded) -> torch.Tensor:
        given.append(recorded)
        return recorded.reward.abs().sum(dim=0)

    given: list[Recorded] = []
    selector, spec = Noting(), make_spec()
    sizes = StoreSizes(1, CAPACITY, unroll_length=3, frame_stack=1, core_size=0)
    store = Store(spec, selector, sizes, CPU, priority_of=initial_priority)
    record(store, make_model(spec), spec, 4, policy_version=7)
    unrolls = store.take(4, timeout=0)
    assert unrolls is not None
    versions, priority = selector.seen
    assert versions.tolist() == [7] * 4
    assert priority is not None
    assert priority.tolist() == unrolls.inputs.reward.abs().sum(dim=0).tolist()
    (recorded,) = given
    others = (unrolls.terminated, unrolls.truncated, unrolls.action, unrolls.behavior_logits, unrolls.behavior_value)
    for mine, other in zip(recorded, (unrolls.inputs.reward, *others), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_prefer_reaches_the_unrolls_that_are_there_and_no_others() -> None:
    """A priority comes back after its unroll was overwritten: the entry holds another one, which it is not about."""
    ring = Ring()
    store = make_store(ring)
    store.commit(store.reserve(CAPACITY))
    unrolls = store.take(CAPACITY, timeout=0)
    assert unrolls is not None
    overwritten = store.reserve(2)
    store.commit(overwritten)
    store.prefer(unrolls.ticket, torch.arange(CAPACITY, dtype=torch.float32))
    expected = {int(entry): float(at) for at, entry in enumerate(unrolls.ticket.entry) if entry not in overwritten}
    assert ring.priority == expected
    assert len(expected) == CAPACITY - 2


class Identity(RuleBasedStateMachine):
    """Whatever is taken is what was committed: an entry is never written and read at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.store = make_store(Ring())
        self.owned: list[int] = []  # by the writer
        self.generations: dict[int, int] = {}
        self.tickets: list[Ticket] = []

    @rule(count=st.integers(1, 3))
    def reserve(self, count: int) -> None:
        entries = self.store.reserve(count).tolist()
        assert not set(entries) & set(self.owned)
        self.owned += entries

    @rule()
    def commit(self) -> None:
        self.store.commit(np.array(self.owned, np.int64))
        for entry in self.owned:
            self.generations[entry] = self.generations.get(entry, 0) + 1
        self.owned = []

    @rule(count=st.integers(1, 3))
    def take(self, count: int) -> None:
        unrolls = self.store.take(count, timeout=0)
        if unrolls is not None:
            entry, generation = (column.tolist() for column in unrolls.ticket)
            assert not set(entry) & set(self.owned)
            assert generation == [self.generations[each] for each in entry]

    @invariant()
    def no_entry_is_lost(self) -> None:
        assert len(self.owned) + self.store.ready + len(self.store._free) == CAPACITY


TestIdentity = Identity.TestCase
TestIdentity.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("overlap", [1, 2, 3])
@pytest.mark.parametrize("frame_stack", [1, 3])
def test_consecutive_unrolls_share_their_rows_frames_and_core_state(overlap: int, frame_stack: int) -> None:
    """Burn-in: the stored core_state is the one that inference had before row 0, however many rows are shared."""
    unroll_length, steps = 5, 40
    pool = FakePool(make_job(1), episode_length=7)
    model = TinyModel(pool.spec.stacked(frame_stack), core_size=3)
    rig = Rig(pool.spec, model, slots=1, unroll_length=unroll_length, frame_stack=frame_stack, overlap=overlap)
    before: list[torch.Tensor] = []  # the core_state before each row
    session = rig.join([0])
    for _ in range(steps):
        before.append(rig.slots.core_state(torch.zeros(1, dtype=torch.int64))[0].clone())
        rows = pool.recv()
        (action,) = rig.run(rig.request(session, rows))
        pool.send(action, rows.env_id)
    stride = unroll_length + 1 - overlap
    starts = range(0, steps - unroll_length, stride)
    unrolls = rig.store.take(len(starts), timeout=0)
    assert unrolls is not None
    assert not rig.store.ready
    for number, start in enumerate(starts):
        torch.testing.assert_close(unrolls.core_state[number], before[start], rtol=0, atol=0)
    for column in unrolls.tensors():
        if column.dim() > 1 and len(column) == unroll_length + 1:
            torch.testing.assert_close(column[:overlap, 1:], column[-overlap:, :-1], rtol=0, atol=0)


def test_store_refuses_unrolls_that_share_more_than_half_of_their_rows() -> None:
    with pytest.raises(ConfigError, match=r"unroll_length=5 .* share 4"):
        Store(make_spec(), Fifo(), StoreSizes(1, 1, 5, 1, 0, overlap=4), CPU)


def test_finish_unrolls_continues_where_the_ring_makes_room() -> None:
    rig = Rig(make_spec(), make_model(make_spec()), slots=2, capacity=2, unroll_length=1)
    rig.store._selector = Ring()
    session = rig.join([0, 1])
    for step in range(20):
        rig.run(rig.request(session, make_rows(np.zeros((2, 2), np.float32), flags=0 if step else RESET)))
    assert rig.store.ready == 2


def test_fresh_drops_what_a_train_batch_leaves_behind() -> None:
    """After an actor was lost and came back there are unrolls of a batch and a half, all of one policy."""
    selector = Fresh()
    selector.add(np.arange(6), np.zeros(6, np.int64))
    picked = selector.pick(4)
    assert picked.entries.tolist() == [2, 3, 4, 5]
    assert len(selector) == 0
    assert sorted(selector.done(picked.entries).tolist()) == [0, 1, 2, 3, 4, 5]
    selector.add(np.arange(4), np.zeros(4, np.int64))
    assert selector.done(selector.pick(4).entries).tolist() == [0, 1, 2, 3]
    assert selector.take_dropped() == {"off_policy": 2}


@pytest.mark.parametrize(("on_policy", "kind"), [(True, Fresh), (False, Fifo), (None, Fifo)])
def test_selector_of_an_on_policy_run_drops_what_is_old(on_policy: bool | None, kind: type) -> None:
    config = LearnerConfig()
    config.algorithm.on_policy = on_policy
    assert type(build_selector(config)) is kind
