"""WHEN a batch runs. Knows nothing of models, slots or streams: it counts rows and never looks at them."""

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
    """Owned by the server thread; other threads may read `waiting_rows`.

    The batch loop asks for a batch when the device is idle. One is due as soon as
      - at least `min_rows` rows wait (1: any row is enough; `max_rows`: only full batches), or
      - the oldest request has waited `max_wait` seconds.
    So it never depends on how many environments are alive. Requests are taken whole and in order of arrival; one with
    more than `max_rows` rows makes a batch of its own.
    """

    def __init__(
        self,
        max_rows: int,
        min_rows: int,
        max_wait: float,
        on_submit: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_submit` is called after every request."""
        self._max_rows = max_rows
        self._min_rows = min(min_rows, max_rows)
        self._max_wait = max_wait
        self._clock = clock
        self._on_submit = on_submit
        self._waiting: deque[tuple[float, Request]] = deque()
        self._rows = 0

    @property
    def waiting_rows(self) -> int:
        return self._rows

    def submit(self, request: Request) -> None:
        self._waiting.append((self._clock(), request))
        self._rows += request.rows
        self._on_submit()

    def drop(self, is_unwanted: Callable[[Request], bool]) -> int:
        """Forget requests whose session has ended; return how many rows they had."""
        before = self._rows
        self._waiting = deque(entry for entry in self._waiting if not is_unwanted(entry[1]))
        self._rows = sum(request.rows for _, request in self._waiting)
        return before - self._rows

    def due_in(self) -> float | None:
        """Return the seconds until a batch is due: 0 for now, None while no request waits."""
        if not self._waiting:
            return None
        if self._rows >= self._min_rows:
            return 0.0
        oldest, _ = self._waiting[0]
        return max(0.0, oldest + self._max_wait - self._clock())

    def take(self) -> list[Request]:
        """Return the next batch, which is empty if none is due."""
        batch: list[Request] = []
        if self.due_in() != 0.0:
            return batch
        rows = 0
        while self._waiting and (not batch or rows + self._waiting[0][1].rows <= self._max_rows):
            _, request = self._waiting.popleft()
            batch.append(request)
            rows += request.rows
        self._rows -= rows
        return batch
