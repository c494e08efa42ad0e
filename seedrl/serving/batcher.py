"""WHEN a batch runs. Knows nothing of models, slots or streams: rows are counted, never looked at."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Countable(Protocol):
    """A request: some rows that are answered together."""

    @property
    def rows(self) -> int: ...


Request = TypeVar("Request", bound=Countable)


class Batcher(Generic[Request]):
    """Thread-safe: any number of producers, one consumer.

    The consumer asks for a batch when the device is idle. A batch goes as soon as
      - at least `min_rows` rows wait (1: whoever waits, goes; `max_rows`: only full batches), or
      - the oldest request has waited `max_wait` seconds.
    So it never depends on how many environments are alive. Requests are taken whole and in order of arrival; one with
    more than `max_rows` rows makes a batch of its own.
    """

    def __init__(
        self, max_rows: int, min_rows: int, max_wait: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_rows = max_rows
        self._min_rows = min(min_rows, max_rows)
        self._max_wait = max_wait
        self._clock = clock
        self._waiting: deque[tuple[float, Request]] = deque()
        self._rows = 0
        self._arrived = threading.Condition()

    @property
    def waiting_rows(self) -> int:
        return self._rows

    def submit(self, request: Request) -> None:
        with self._arrived:
            self._waiting.append((self._clock(), request))
            self._rows += request.rows
            if self._rows >= self._min_rows or len(self._waiting) == 1:
                self._arrived.notify()

    def take(self, timeout: float) -> list[Request]:
        """The next batch; empty if none is due before the timeout."""
        give_up = self._clock() + timeout
        with self._arrived:
            while True:
                now = self._clock()
                due = self._due_at()
                if due <= now:
                    return self._pop()
                if give_up <= now:
                    return []
                self._arrived.wait(min(due, give_up) - now)

    def _due_at(self) -> float:
        if not self._waiting:
            return float("inf")
        if self._rows >= self._min_rows:
            return 0.0
        oldest, _ = self._waiting[0]
        return oldest + self._max_wait

    def _pop(self) -> list[Request]:
        batch: list[Request] = []
        rows = 0
        while self._waiting and (not batch or rows + self._waiting[0][1].rows <= self._max_rows):
            _, request = self._waiting.popleft()
            batch.append(request)
            rows += request.rows
        self._rows -= rows
        return batch
