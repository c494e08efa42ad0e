"""The ring of unrolls: bounded, first in first out, nothing mixed, frames stored once."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from seedrl.columns import Record
from seedrl.rows import ENDED, RESET, TERMINATED, TRUNCATED
from seedrl.selection.fifo import Fifo
from seedrl.serving.sessions import Request, Session
from seedrl.store import Store, StoreSizes
from seedrl.types import ModelOutput, Ticket, Unrolls
from tests.builders import keep_core_state
from tests.fakes import make_spec
from tests.rig import CPU, Rig, make_rows

FOREVER = 3600.0
T = 3


def make_store(
    slots: int = 2,
    capacity: int = 3,
    frame_stack: int = 1,
    core_size: int = 0,
    on_free: Callable[[], None] = lambda: None,
) -> Store:
    sizes = StoreSizes(slots, capacity, T, frame_stack, core_size)
    return Store(make_spec(shape=(1,), num_actions=2), Fifo(), sizes, CPU, on_free)


def gathered(store: Store, entries: list[int]) -> Unrolls:
    ticket = Ticket(np.array(entries), np.zeros(len(entries), np.int64))
    return store.columns.gather(ticket, np.ones(len(entries), np.float32))


def write(store: Store, entry: int, t: int, value: int, age: int = 0) -> None:
    """One row in which everything is `value`."""
    index = [np.array([number]) for number in (entry, t, age)]
    place = store.columns.locate(*index)
    store.columns.write_frames(place.frame, np.array([[value]], np.float32))
    known = Record(
        reward=np.array([value], np.float32),
        flags=np.array([RESET | TERMINATED if value % 2 else TRUNCATED], np.uint8),
        age=index[2],
        last_action=np.array([value]),
        action=np.array([value]),
        policy_version=np.array(value),
    )
    store.columns.write_record(place, known)
    store.columns.write_output(place, ModelOutput(torch.full((1, 2), float(value)), torch.tensor([float(value)])))


def write_unroll(store: Store, entry: int, first: int) -> None:
    for t in range(T + 1):
        write(store, entry, t, first + t)


def values(unrolls: Unrolls) -> list[list[int]]:
    """Return what `write` wrote, unroll by unroll, after checking that all columns agree on it."""
    value = unrolls.action
    odd = value % 2 == 1
    assert torch.equal(unrolls.inputs.observation, value.float().unsqueeze(-1))
    assert torch.equal(unrolls.inputs.reward, value.float())
    assert torch.equal(unrolls.inputs.last_action, value)
    assert torch.equal(unrolls.inputs.reset, odd)
    assert torch.equal(unrolls.terminated, odd)
    assert torch.equal(unrolls.truncated, ~odd)
    assert torch.equal(unrolls.behavior_logits, value.float().unsqueeze(-1).expand(-1, -1, 2))
    assert torch.equal(unrolls.behavior_value, value.float())
    assert unrolls.policy_version.tolist() == value.tolist()
    return value.T.tolist()


def test_gather_any_index_gives_those_unrolls_time_major() -> None:
    store = make_store()
    for entry in range(5):
        write_unroll(store, entry, 10 * entry)
    unrolls = gathered(store, [4, 0, 4, 2])
    assert unrolls.action.shape == (T + 1, 4)
    assert values(unrolls) == [[40, 41, 42, 43], [0, 1, 2, 3], [40, 41, 42, 43], [20, 21, 22, 23]]


def test_gather_gives_core_state_before_row_zero() -> None:
    store = make_store(core_size=2)
    entries, rows = np.array([3, 1, 3, 1]), np.array([0, 0, 1, 1])
    before = torch.tensor([[3.0, 3.5], [1.0, 1.5], [9.0, 9.5], [8.0, 8.5]])
    keep_core_state(store, entries, rows, before)
    assert gathered(store, [1, 3]).core_state.tolist() == [[1.0, 1.5], [3.0, 3.5]]


def test_roll_makes_last_row_the_first_of_the_next() -> None:
    store = make_store()
    write_unroll(store, 0, 10)
    store.columns.roll(np.array([0]), np.array([3]))
    for t in range(1, T + 1):
        write(store, 3, t, 13 + t)
    assert values(gathered(store, [0, 3])) == [[10, 11, 12, 13], [13, 14, 15, 16]]


def test_take_gives_oldest_first_and_frees_them() -> None:
    store = make_store(capacity=3)
    entries = store.reserve(3).tolist()
    for entry in entries:
        write_unroll(store, entry, 10 * entry)
    store.commit(np.array([entries[2], entries[0]]))
    store.commit(np.array([entries[1]]))
    unrolls = store.take(2, timeout=0)
    assert unrolls is not None
    assert [unroll[0] // 10 for unroll in values(unrolls)] == [entries[2], entries[0]]
    assert store.ready == 1
    assert sorted(store.reserve(3).tolist()) == sorted([entries[2], entries[0]])


def test_take_too_few_ready_gives_none_and_keeps_them() -> None:
    store = make_store()
    store.commit(store.reserve(1))
    assert store.take(2, timeout=0) is None
    assert store.ready == 1
    assert store.take(1, timeout=0) is not None


def test_take_copies_out_what_later_writes_do_not_touch() -> None:
    store = make_store()
    (entry,) = store.reserve(1).tolist()
    write_unroll(store, entry, 10)
    store.commit(np.array([entry]))
    unrolls = store.take(1, timeout=0)
    write_unroll(store, entry, 90)
    assert unrolls is not None
    assert values(unrolls) == [[10, 11, 12, 13]]


def test_reserve_gives_what_there_is_and_empty_when_full() -> None:
    store = make_store(slots=2, capacity=3)
    assert store.reserve(2).tolist() == [4, 3]  # 0 and 1 belong to the slots
    assert store.reserve(2).tolist() == [2]
    assert store.reserve(2).tolist() == []


class WatchedCondition(threading.Condition):
    """Tells when somebody is about to wait, with the lock held until they do."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waiting.set()
        return super().wait(timeout)


def test_take_tells_that_entries_are_free() -> None:
    free: list[int] = []
    store = make_store(slots=1, capacity=2, on_free=lambda: free.append(len(store.reserve(2))))
    store.commit(store.reserve(2))
    assert store.take(1, timeout=0) is not None
    assert free == [1]


def test_take_empty_blocks_until_commit() -> None:
    store = make_store()
    watched = store._changed = WatchedCondition()
    (entry,) = store.reserve(1).tolist()
    write_unroll(store, entry, 10)
    got: list[Unrolls | None] = []
    thread = threading.Thread(target=lambda: got.append(store.take(1, FOREVER)), daemon=True)
    thread.start()
    assert watched.waiting.wait(timeout=10)
    store.commit(np.array([entry]))
    thread.join(timeout=10)
    assert len(got) == 1
    assert got[0] is not None
    assert values(got[0]) == [[10, 11, 12, 13]]


def test_nbytes_equals_sum_by_hand() -> None:
    sizes = StoreSizes(slots=2, capacity=3, unroll_length=4, frame_stack=3, core_size=5)
    store = Store(make_spec(shape=(1, 4, 4), dtype="uint8", num_actions=3), Fifo(), sizes, CPU)
    entries, rows = 2 + 3 + 1, 4 + 1  # one is spare
    frames = (rows + 3 - 1) * 16  # the stack of row 0 reaches back two frames
    floats = 4 * (3 + 1)  # logits, value
    assert store.columns.nbytes == entries * (
        frames + rows * floats + 2 * 4 * 5
    )  # core_state: before row 0, and before the last one


def stack_of(store: Store, entry: int, t: int, age: int) -> list[float]:
    place = store.columns.locate(*(np.array([number]) for number in (entry, t, age)))
    stack: list[float] = store.columns.stacks(place)[0].tolist()
    return stack


def test_stacks_repeat_the_first_frame_of_an_episode() -> None:
    store = make_store(frame_stack=3)
    for t, (value, age) in enumerate([(10, 0), (11, 1), (20, 0), (21, 1)]):  # a new episode at t = 2
        write(store, 0, t, value, age)
    assert [stack_of(store, 0, t, age) for t, age in enumerate([0, 1, 0, 1])] == [
        [10, 10, 10],
        [10, 10, 11],
        [20, 20, 20],
        [20, 20, 21],
    ]
    assert gathered(store, [0]).inputs.observation[:, 0].tolist() == [
        [10, 10, 10],
        [10, 10, 11],
        [20, 20, 20],
        [20, 20, 21],
    ]


@pytest.mark.parametrize("frame_stack", [1, 2, 4, 6])
def test_stacks_reach_back_over_unrolls_however_short(frame_stack: int) -> None:
    """The stack may be longer than an unroll (T + 1 = 4 rows): frames are handed on from entry to entry."""
    store = make_store(frame_stack=frame_stack)
    frames = list(range(10, 10 + 5 * T))
    entry, t = 0, 0
    for age, frame in enumerate(frames):
        age = min(age, frame_stack - 1)
        write(store, entry, t, frame, age)
        seen = [float(frames[max(0, frame - 10 - back)]) for back in reversed(range(frame_stack))]
        assert stack_of(store, entry, t, age) == seen
        if t == T:
            fresh = 2 + (entry + 1) % 3
            store.columns.roll(np.array([entry]), np.array([fresh]))
            assert stack_of(store, fresh, 0, age) == seen
            entry, t = fresh, 0
        t += 1


@dataclass
class Row:
    """The oracle's knowledge of one row."""

    slot: int
    session: int
    stack: list[int]  # numbers of the rows of this episode that the stack shows
    reward: float
    flags: int
    last_action: int
    action: int


class Recording(RuleBasedStateMachine):
    """Slots, store and inference beside plain lists, under any interleaving of slots, ends and sessions."""

    STACK = 3
    LEASES = ((0, 1), (2, 3))

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(make_spec(), capacity=6, unroll_length=T, frame_stack=self.STACK)
        self.sessions = [self.rig.join(lease) for lease in self.LEASES]
        self.number = 0
        self.partial: list[list[Row]] = [[] for _ in range(4)]
        self.episode: list[list[int]] = [[] for _ in range(4)]  # row numbers; empty: RESET comes next
        self.finished: deque[list[Row]] = deque()
        self.dropped = 0

    @rule(
        slots=st.lists(st.integers(0, 3), min_size=1, unique=True),
        endings=st.lists(st.sampled_from([0, 0, 0, TERMINATED, TRUNCATED]), min_size=4, max_size=4),
        swap=st.booleans(),
    )
    def step(self, slots: list[int], endings: list[int], swap: bool) -> None:
        while len(self.finished) > 2:  # room for four more: a full store would block
            self.learn()
        rows = [self.new_row(slot, ending) for slot, ending in zip(slots, endings, strict=False)]
        batch = [[row for row in rows if row.slot in lease] for lease in self.LEASES]
        parts = [(session, part) for session, part in zip(self.sessions, batch, strict=True) if part]
        parts = parts[::-1] if swap else parts
        requests = [self.request(session, part) for session, part in parts]
        actions = self.rig.run(*requests)
        for (_, part), action in zip(parts, actions, strict=True):
            for row, chosen in zip(part, action, strict=True):
                row.action = int(chosen)
                self.record(row)

    @rule(which=st.integers(0, 1), is_told=st.booleans())
    def replace_session(self, which: int, is_told: bool) -> None:
        """One session ends, and another gets its slots; if inference is not told, it notices by the first RESET."""
        if is_told:
            self.rig.inference.release(self.sessions[which])
            for slot in self.LEASES[which]:
                self.discard(slot)
        self.sessions[which] = self.rig.join(self.LEASES[which])
        for slot in self.LEASES[which]:
            self.episode[slot] = []

    @precondition(lambda self: self.finished)
    @rule()
    def learn(self) -> None:
        unrolls = self.rig.store.take(1, timeout=0)
        expected = self.finished.popleft()
        assert unrolls is not None
        assert len({(row.slot, row.session) for row in expected}) == 1
        numbers = [[[row.slot, number] for number in row.stack] for row in expected]
        assert unrolls.inputs.observation[:, 0].view(T + 1, self.STACK, 2).tolist() == numbers
        assert unrolls.inputs.reward[:, 0].tolist() == [row.reward for row in expected]
        assert unrolls.inputs.reset[:, 0].tolist() == [bool(row.flags & RESET) for row in expected]
        assert unrolls.inputs.last_action[:, 0].tolist() == [row.last_action for row in expected]
        assert unrolls.terminated[:, 0].tolist() == [bool(row.flags & TERMINATED) for row in expected]
        assert unrolls.truncated[:, 0].tolist() == [bool(row.flags & TRUNCATED) for row in expected]
        assert unrolls.action[:, 0].tolist() == [row.action for row in expected]

    @invariant()
    def counts_agree(self) -> None:
        assert self.rig.store.ready == len(self.finished)
        assert self.rig.metrics.rows_dropped["partial_unroll"] == self.dropped

    def new_row(self, slot: int, ending: int) -> Row:
        self.number += 1
        episode = self.episode[slot]
        flags = ending if episode else RESET
        last_action = self.partial[slot][-1].action if episode else 0
        episode.append(self.number)
        stack = [episode[max(0, len(episode) - 1 - back)] for back in reversed(range(self.STACK))]
        if flags & ENDED:
            self.episode[slot] = []
        return Row(slot, self.sessions[slot // 2].id, stack, float(self.number % 7), flags, last_action, action=-1)

    def request(self, session: Session, rows: list[Row]) -> Request:
        return self.rig.request(
            session,
            make_rows(
                np.array([[row.slot, row.stack[-1]] for row in rows], np.float32),
                flags=[row.flags for row in rows],
                env_id=[row.slot % 2 for row in rows],
                reward=[row.reward for row in rows],
            ),
        )

    def record(self, row: Row) -> None:
        partial = self.partial[row.slot]
        if partial and partial[0].session != row.session:
            self.discard(row.slot)
        partial.append(row)
        if len(partial) == T + 1:
            self.finished.append(list(partial))
            del partial[:-1]

    def discard(self, slot: int) -> None:
        self.dropped += len(self.partial[slot])
        self.partial[slot].clear()


TestRecording = Recording.TestCase
TestRecording.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None, phases=[Phase.reuse, Phase.generate, Phase.shrink]
)
