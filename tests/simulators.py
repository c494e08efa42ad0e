"""Environments with Gymnasium's interface and no gymnasium, for threads and for processes, which import this module.

env.id=tests.simulators:Counter makes one.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from seedrl.specs import ArraySpec, discrete

OVER = threading.Event()  # lets environments that hang in threads of a test go on, so that those can end


@contextlib.contextmanager
def released_at_the_end() -> Iterator[None]:
    """Environments hang only within this block; no thread of the test waits for ever."""
    OVER.clear()
    try:
        yield
    finally:
        OVER.set()


class Counter:
    """Observes how often it was reset, how many steps ago, and its last action; ends after `length` steps."""

    observation_space: Any = ArraySpec((3,), "float64")
    action_space: Any = discrete(4)
    closed = 0

    def __init__(self, length: int = 3, ending: str = "terminated", trouble: str = "", at: int = 5) -> None:
        self.length, self.ending = length, ending
        self._trouble, self._at = trouble, at
        self._resets, self._age, self._steps = 0, 0, 0
        self.seeds: list[int | None] = []

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.seeds.append(seed)
        self._random = np.random.default_rng(seed) if seed is not None else self._random
        self._resets, self._age = self._resets + 1, 0
        return [self._resets, 0, self._random.random()], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._age, self._steps = self._age + 1, self._steps + 1
        if self._steps == self._at:
            self._have_trouble()
        is_last = self._age == self.length
        ends = (is_last and "terminated" in self.ending, is_last and "truncated" in self.ending)
        return [self._resets, self._age, action], self._age, *ends, {}

    def _have_trouble(self) -> None:
        if self._trouble == "raise":
            raise ArithmeticError("no such luck")
        if self._trouble == "exit":
            os._exit(9)
        if self._trouble == "hang":
            OVER.wait()
        if self._trouble == "sleep":
            time.sleep(0.5)

    def close(self) -> None:
        Counter.closed += 1


class Sluggish(Counter):
    """Takes so many seconds for a step as long as there is such a file."""

    def __init__(self, path: str, seconds: float) -> None:
        super().__init__(length=50)
        self._path, self._seconds = path, seconds

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if os.path.exists(self._path):
            time.sleep(self._seconds)
        return super().step(action)


def fail() -> None:
    """Makes nothing."""
    raise OSError("no licence for this simulator")


NOT_CALLABLE = 3
