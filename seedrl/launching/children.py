"""A child process over its restarts: when it may be started again, and when not. Knows nothing of what it does."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

CRASH_SECONDS = 600.0  # crashes longer ago are forgotten
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)  # before any fork: a child of a process with threads must not load anything

Process = subprocess.Popen[bytes]


class Crashes:
    """Of late, of one role: there may be so many, and each makes the next start wait longer."""

    def __init__(self, limit: int, slowest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._slowest = slowest  # seconds
        self._clock = clock
        self._times: deque[float] = deque()

    def add(self) -> None:
        now = self._clock()
        self._times.append(now)
        while self._times[0] < now - CRASH_SECONDS:
            self._times.popleft()

    @property
    def count(self) -> int:
        return len(self._times)

    @property
    def are_too_many(self) -> bool:
        return self.count > self._limit

    @property
    def back_off(self) -> float:
        """Seconds."""
        return min(self._slowest, 0.5 * self.count)

    @property
    def words(self) -> str:
        return f"crashed {self.count} times within {CRASH_SECONDS / 60:.0f} minutes"


class Child:
    """One process of a role, and those that take its place. Owned by the supervisor."""

    def __init__(self, name: str, start: Callable[[], Process]) -> None:
        self.name = name
        self._start = start
        self._due: float | None = None
        self.process: Process | None = None
        self.starts = 0
        self.exit_code: int | None = None  # of the process before
        self.last_words = ""

    @property
    def pid(self) -> int:
        return self.process.pid if self.process else 0

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        self._due = None
        self.process = self._start()
        self.starts += 1

    def start_in(self, seconds: float) -> None:
        self._due = time.monotonic() + seconds

    @property
    def is_due(self) -> bool:
        """Whether it is going to be started again, sooner or later."""
        return self._due is not None

    def start_if_due(self) -> bool:
        """Whether it was."""
        if self._due is None or time.monotonic() < self._due:
            return False
        self.start()
        return True

    def ended(self) -> int | None:
        """The exit code of a process whose end nobody has looked at yet; negative: ended by a signal."""
        if self._due is not None or self.process is None:
            return None
        return self.process.poll()

    def ask_to_end(self) -> None:
        """If it runs."""
        if self.process is not None and self.is_running:
            self.process.terminate()

    def kill(self) -> None:
        """With whatever it has started, if it runs."""
        if self.process is not None and self.is_running:
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, deadline: float) -> None:
        """Asked to end before, it is killed if it does not."""
        if self.process is None:
            return
        try:
            self.exit_code = self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            self.exit_code = self.process.wait()
        if self.exit_code == 0:
            self.last_words = ""


def signal_of(code: int) -> str:
    """The name of the signal that ended a process with this exit code; empty if none did."""
    number = -code if code < 0 else code - 128
    return signal.Signals(number).name if number in set(signal.Signals) else ""


def start_module(module: str, *arguments: str, orphaned: int = signal.SIGTERM, **options: Any) -> Process:
    """A child that gets no signals from the terminal, and this one should this process die."""
    command = [sys.executable, "-m", module, *arguments]
    before = partial(end_with_parent, orphaned, os.getpid())
    return subprocess.Popen(command, start_new_session=True, preexec_fn=before, **options)


def end_with_parent(number: int = signal.SIGTERM, parent: int = 0) -> None:
    """For preexec_fn: the child gets a signal should this process die, or the thread that started it."""
    if hasattr(LIBC, "prctl"):  # Linux
        LIBC.prctl(PR_SET_PDEATHSIG, number)
    if parent and os.getppid() != parent:  # it has died before that
        os._exit(1)
