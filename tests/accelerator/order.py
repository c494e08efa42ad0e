"""Happens-before over threads, streams and locks: which kernels of the simulated accelerator could meet.

A clock says of every stream how many of its kernels are surely over, or come surely before. Streams, threads and locks
have one each; waiting joins clocks, and launching a kernel joins the thread's into the stream's. Two kernels that touch
the same memory, one of them writing, *race* unless the clock of the later one includes the earlier one.

Threads are played one after the other by a single real one (`Order.thread`), so that every run finds the same races.
"""

import threading
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

DEFAULT = "default"  # the stream of threads that choose none
Clock = Counter[str]  # stream → number of its kernels
Rows = list[int] | None  # of the first dimension; None for all of them


class Stamp(NamedTuple):
    """One use of memory by a kernel."""

    stream: str
    number: int
    kernel: str


class Memory:
    """The uses of one storage that later ones may conflict with, row by row where the rows are known."""

    def __init__(self, made_in: str) -> None:
        self.made_in = made_in
        self.users: Clock = Counter()
        self._written: dict[int | None, Stamp] = {}
        self._read: defaultdict[int | None, dict[str, Stamp]] = defaultdict(dict)

    def read(self, stamp: Stamp, rows: Rows) -> Iterator[Stamp]:
        """Note the use; yield those before it that it must come after."""
        yield from (self._written[row] for row in _overlap(rows, self._written))
        for row in [None] if rows is None else rows:
            self._read[row][stamp.stream] = stamp
        self.users[stamp.stream] = stamp.number

    def write(self, stamp: Stamp, rows: Rows) -> Iterator[Stamp]:
        """Note the use; yield those before it that it must come after."""
        yield from (self._written[row] for row in _overlap(rows, self._written))
        yield from self.readers(rows)
        for row in [None] if rows is None else rows:
            self._written[row] = stamp
            self._read.pop(row, None)
        self.users[stamp.stream] = stamp.number

    def readers(self, rows: Rows = None) -> list[Stamp]:
        return [stamp for row in _overlap(rows, self._read) for stamp in self._read[row].values()]


def _overlap(rows: Rows, known: Iterable[int | None]) -> list[int | None]:
    if rows is None:
        return list(known)
    return [row for row in {*rows, None} if row in known]


class Arrival(NamedTuple):
    """A copy to pinned memory of the host that is there only once the host has waited for it."""

    stream: str
    number: int
    land: Callable[[], object]


class Order:
    """Owned by the one real thread of a test."""

    def __init__(self) -> None:
        self.races: Counter[str] = Counter()
        self.is_watching = False  # memory; clocks always run
        self.host = "main"
        self._current: defaultdict[str, str] = defaultdict(lambda: DEFAULT)  # thread → its stream
        self._clocks: defaultdict[str, Clock] = defaultdict(Counter)
        self._memory: dict[int, Memory] = {}
        self._alive: Counter[int] = Counter()  # tensors, by storage
        self._kept: list[Tensor] = []  # so that an address is one storage for ever
        self._arrivals: deque[Arrival] = deque()

    @contextmanager
    def watching(self) -> Iterator[Counter[str]]:
        """Look for races inside; yield where they are counted."""
        self.__init__()  # type: ignore[misc]
        self.is_watching = True
        try:
            yield self.races
        finally:
            self.is_watching = False
            self._kept.clear()
            self._memory.clear()

    # Threads and streams.

    @property
    def stream(self) -> str:
        return self._current[self.host]

    @contextmanager
    def thread(self, name: str) -> Iterator[None]:
        """Play a thread. One that is new knows what the thread that started it knows."""
        before = self.host
        if f"thread {name}" not in self._clocks:
            self.join(f"thread {name}", f"thread {before}")
        self.host = name
        try:
            yield
        finally:
            self.host = before

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Make a stream this thread's current one."""
        host, before = self.host, self.stream
        self._current[host] = stream
        try:
            yield
        finally:
            self._current[host] = before

    def join(self, to: str, of: str) -> None:
        self._clocks[to] |= self._clocks[of]

    def clock(self, of: str) -> Clock:
        """Return a copy."""
        return Counter(self._clocks[of])

    def stream_waits(self, stream: str, for_clock: Clock) -> None:
        self._clocks[stream] |= for_clock

    def host_waits(self, for_clock: Clock) -> None:
        """The thread has waited for kernels; what they copied to the host is there."""
        known = self._clocks[f"thread {self.host}"]
        known |= for_clock
        for _ in range(len(self._arrivals)):
            arrival = self._arrivals.popleft()
            if known[arrival.stream] >= arrival.number:
                arrival.land()
            else:
                self._arrivals.append(arrival)

    def arrives_later(self, land: Callable[[], object]) -> None:
        """Defer the effect of the newest kernel of this stream until the host has waited for it."""
        self._arrivals.append(Arrival(self.stream, self._clocks[self.stream][self.stream], land))

    # Kernels.

    def kernel(
        self,
        name: str,
        reads: list[Tensor],
        writes: list[Tensor],
        fresh: list[Tensor],
        read_rows: Rows = None,
        written_rows: Rows = None,
    ) -> None:
        """Note a kernel; the rows, if known, are those of the first tensor read and of the tensor written."""
        stream = self.stream
        self.join(stream, f"thread {self.host}")
        clock = self._clocks[stream]
        clock[stream] += 1
        if not self.is_watching:
            return
        stamp = Stamp(stream, clock[stream], f"{name} on {stream}")
        for raw in fresh:
            self._of(raw)
        for i, raw in enumerate(reads):
            before = self._of(raw).read(stamp, read_rows if i == 0 else None)
            self._check(clock, before, f"{stamp.kernel} reads what is written by")
        for raw in (*writes, *fresh):
            before = self._of(raw).write(stamp, written_rows)
            self._check(clock, before, f"{stamp.kernel} overwrites what is used by")

    def host_writes(self, pinned: Tensor) -> None:
        """Note that the host has written to pinned memory: no copy from it may still be under way."""
        if self.is_watching:
            known = self._clocks[f"thread {self.host}"]
            self._check(known, self._of(pinned).readers(), "the host overwrites pinned memory that is read by")

    def _check(self, clock: Clock, earlier: Iterable[Stamp], what: str) -> None:
        for stamp in earlier:
            if clock[stamp.stream] < stamp.number:
                self.races[f"{what} {stamp.kernel}"] += 1

    # Allocation.

    def made(self, tensor: Any, raw: Tensor) -> None:
        """Note a tensor. Memory whose last one dies goes back to the stream that it was made in, for reuse at once."""
        if self.is_watching:
            key = raw.untyped_storage().data_ptr()
            self._alive[key] += 1
            weakref.finalize(tensor, self._dies, key).atexit = False

    def _dies(self, key: int) -> None:
        self._alive[key] -= 1
        memory = self._memory.get(key)
        if self._alive[key] or memory is None:
            return
        known = self._clocks[memory.made_in] | self._clocks[f"thread {self.host}"]
        for stream, number in memory.users.items():
            if known[stream] < number:
                self.races[f"memory of {memory.made_in} is freed while {stream} uses it"] += 1

    def _of(self, raw: Tensor) -> Memory:
        key = raw.untyped_storage().data_ptr()
        if key not in self._memory:
            self._memory[key] = Memory(self.stream)
            self._kept.append(raw)
        return self._memory[key]


ORDER = Order()


class TrackedLock:
    """A lock that hands on what its last holder knew; fits threading.Condition."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._name = f"lock {id(self)}"

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        has_got = self._lock.acquire(blocking, timeout)
        if has_got:
            ORDER.join(f"thread {ORDER.host}", self._name)
        return has_got

    def release(self) -> None:
        ORDER.join(self._name, f"thread {ORDER.host}")
        self._lock.release()

    def _is_owned(self) -> bool:
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


class TrackedThreading:
    """Stands in for the module `threading` in modules that hand tensors over."""

    Lock = TrackedLock
    RLock = TrackedLock

    @staticmethod
    def Condition() -> threading.Condition:
        return threading.Condition(TrackedLock())  # type: ignore[arg-type]


def rows_in(index: Tensor) -> list[int]:
    return [int(row) for row in index.to(torch.int64).tolist()]
