"""Log lines about peers that were refused, at a bounded rate: no peer can fill the log. Knows nothing of gRPC."""

import time
from collections.abc import Callable

LINES = 5  # in each window
WINDOW_SECONDS = 60.0


class RefusalLog:
    """Says the first lines of every window; the next window begins by counting the others. Owned by one thread."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say = say
        self._clock = clock
        self._window_ends = float("-inf")
        self._lines = 0  # of this window, said or not

    def __call__(self, line: str) -> None:
        unsaid = 0
        if self._clock() >= self._window_ends:
            self._window_ends = self._clock() + WINDOW_SECONDS
            unsaid, self._lines = max(0, self._lines - LINES), 0
        self._lines += 1
        if self._lines <= LINES:
            self._say(f"{line}; {unsaid:,} refusals before it were not logged" if unsaid else line)
