"""Invariant 5: a batch goes when it is full, worth it or old enough, and never waits for the absent."""

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from seedrl.serving.batcher import Batcher
from tests.fakes import FakeClock

MAX_WAIT = 0.5
FOREVER = 3600.0


@dataclass(frozen=True, slots=True)
class Rows:
    """A request that is nothing but its rows and its number."""

    rows: int
    number: int = 0


def make_batcher(max_rows: int = 8, min_rows: int = 4, max_wait: float = MAX_WAIT) -> tuple[Batcher[Rows], FakeClock]:
    clock = FakeClock()
    return Batcher(max_rows, min_rows, max_wait, clock=clock), clock


def drain(batcher: Batcher[Rows]) -> list[list[Rows]]:
    batches = []
    while batch := batcher.take():
        batches.append(batch)
    return batches


def test_take_nothing_waiting_returns_empty() -> None:
    batcher, clock = make_batcher()
    clock.advance(10 * MAX_WAIT)
    assert batcher.take() == []


def test_take_full_goes_at_once_and_leaves_the_rest() -> None:
    batcher, _ = make_batcher(max_rows=4, min_rows=4)
    requests = [Rows(2, number) for number in range(3)]
    for request in requests:
        batcher.submit(request)
    assert batcher.take() == requests[:2]
    assert batcher.take() == []  # two rows wait, four are worth it
    assert batcher.waiting_rows == 2


def test_take_min_rows_reached_goes_at_once() -> None:
    batcher, _ = make_batcher(max_rows=100, min_rows=3)
    batcher.submit(Rows(2))
    assert batcher.take() == []
    batcher.submit(Rows(1))
    assert batcher.take() == [Rows(2), Rows(1)]


def test_take_min_rows_of_one_goes_with_whoever_waits() -> None:
    batcher, _ = make_batcher(min_rows=1, max_wait=FOREVER)
    batcher.submit(Rows(1))
    assert batcher.take() == [Rows(1)]


def test_take_oldest_waited_max_wait_goes_with_everyone() -> None:
    batcher, clock = make_batcher(min_rows=4)
    batcher.submit(Rows(1))
    clock.advance(MAX_WAIT * 0.75)
    batcher.submit(Rows(1))  # the newest does not start the wait again
    assert batcher.take() == []
    clock.advance(MAX_WAIT * 0.25)
    assert batcher.take() == [Rows(1), Rows(1)]


def test_take_request_left_behind_keeps_its_age() -> None:
    batcher, clock = make_batcher(max_rows=4, min_rows=4)
    for rows in (3, 2):
        batcher.submit(Rows(rows))
    assert batcher.take() == [Rows(3)]
    clock.advance(MAX_WAIT)
    assert batcher.take() == [Rows(2)]


def test_take_min_rows_above_max_rows_goes_when_full() -> None:
    batcher, _ = make_batcher(max_rows=2, min_rows=50, max_wait=FOREVER)
    batcher.submit(Rows(2))
    assert batcher.take() == [Rows(2)]


def test_take_oversize_request_goes_alone() -> None:
    batcher, _ = make_batcher(max_rows=4, min_rows=1)
    requests = [Rows(1), Rows(9), Rows(1)]
    for request in requests:
        batcher.submit(request)
    assert drain(batcher) == [[Rows(1)], [Rows(9)], [Rows(1)]]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=20),
    max_rows=st.integers(1, 10),
    min_rows=st.integers(1, 12),
)
def test_take_any_sizes_go_whole_in_order_within_max_rows(sizes: list[int], max_rows: int, min_rows: int) -> None:
    batcher, clock = make_batcher(max_rows, min_rows)
    requests = [Rows(rows, number) for number, rows in enumerate(sizes)]
    for request in requests:
        batcher.submit(request)
    clock.advance(MAX_WAIT)
    batches = drain(batcher)
    assert [request for batch in batches for request in batch] == requests
    assert all(len(batch) == 1 or sum(request.rows for request in batch) <= max_rows for batch in batches)
    for batch, following in pairwise(batches):  # no room was wasted
        assert sum(request.rows for request in batch) + following[0].rows > max_rows
    assert batcher.waiting_rows == 0


class Interleavings(RuleBasedStateMachine):
    """Submits, takes and passing time in any order, beside a plain list of (time, request)."""

    MAX_ROWS, MIN_ROWS = 6, 4

    def __init__(self) -> None:
        super().__init__()
        self.batcher, self.clock = make_batcher(self.MAX_ROWS, self.MIN_ROWS)
        self.waiting: list[tuple[float, Rows]] = []
        self.number = 0

    @rule(rows=st.integers(1, 9))
    def submit(self, rows: int) -> None:
        self.number += 1
        request = Rows(rows, self.number)
        self.waiting.append((self.clock(), request))
        self.batcher.submit(request)

    @rule(seconds=st.sampled_from([0.125, 0.25, 0.5]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def take(self) -> None:
        batch = self.batcher.take()
        assert batch == [request for _, request in self.waiting[: len(batch)]]
        assert bool(batch) == self.is_due()
        assert len(batch) <= 1 or sum(request.rows for request in batch) <= self.MAX_ROWS
        del self.waiting[: len(batch)]

    @precondition(lambda self: self.waiting)
    @rule()
    def wait_long_enough(self) -> None:
        self.clock.advance(MAX_WAIT)
        assert self.is_due()
        self.take()

    @invariant()
    def counts_what_waits(self) -> None:
        assert self.batcher.waiting_rows == sum(request.rows for _, request in self.waiting)

    def is_due(self) -> bool:
        rows = sum(request.rows for _, request in self.waiting)
        return bool(self.waiting) and (rows >= self.MIN_ROWS or self.clock() - self.waiting[0][0] >= MAX_WAIT)


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_drop_forgets_requests_and_keeps_the_age_of_the_others() -> None:
    batcher, clock = make_batcher(min_rows=4)
    for number in range(3):
        batcher.submit(Rows(1, number))
    clock.advance(MAX_WAIT / 2)
    batcher.submit(Rows(1, 3))
    assert batcher.drop(lambda request: request.number < 2) == 2
    assert batcher.waiting_rows == 2
    assert batcher.due_in() == MAX_WAIT / 2
    clock.advance(MAX_WAIT / 2)
    assert batcher.take() == [Rows(1, 2), Rows(1, 3)]
    assert batcher.drop(lambda request: True) == 0


def test_due_in_counts_down_from_the_oldest_request() -> None:
    batcher, clock = make_batcher(min_rows=4)
    assert batcher.due_in() is None
    batcher.submit(Rows(1))
    clock.advance(MAX_WAIT * 0.75)
    batcher.submit(Rows(1))
    assert batcher.due_in() == MAX_WAIT * 0.25
    clock.advance(MAX_WAIT)
    assert batcher.due_in() == 0


def test_due_in_is_zero_once_it_is_worth_it() -> None:
    batcher, _ = make_batcher(min_rows=4)
    batcher.submit(Rows(4))
    assert batcher.due_in() == 0


def test_submit_tells_whoever_runs_batches() -> None:
    told: list[int] = []
    batcher: Batcher[Rows] = Batcher(4, 1, MAX_WAIT, on_submit=lambda: told.append(batcher.waiting_rows))
    batcher.submit(Rows(3))
    batcher.submit(Rows(2))
    assert told == [3, 5]
