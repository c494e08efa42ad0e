"""Child processes over their restarts: how to start and end them, and when to restart. Knows nothing of their work."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from seedrl.errors import ConfigError, Refused, RunDirectoryError, SeedrlError

CRASH_SECONDS = 600.0  # crashes longer ago are forgotten
GOODBYE_SECONDS = 20.0  # from asking a process to end to killing it
STOP_SECONDS = 25.0  # from a signal until a learner that has not ended is killed
RETURN_SECONDS = 5.0  # until an actor that ended cleanly is started again, if the learner still runs
# Exit codes of a process that would fail again in the same way.
FATAL_CODES: dict[int, type[SeedrlError]] = {
    error.exit_code: error for error in (ConfigError, RunDirectoryError, Refused)
}
LAST_WORDS = "seedrl "  # begins the line in which a process says why it ends; the traceback may follow it
# Exit codes of a process that was asked to end by a signal.
REQUESTED = {sign for number in (signal.SIGINT, signal.SIGTERM) for sign in (-number, 128 + number)}
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)  # before any fork: a child of a process with threads must not load anything

Process = subprocess.Popen[bytes]


class LastWords(NamedTuple):
    """The end of what a process has printed."""

    words: str  # one line
    traceback: str = ""  # of the user's own code, if that has failed

    @classmethod
    def of(cls, output: str) -> "LastWords":
        """Return the line in which the process says why it ends, or else its last line."""
        lines = output.strip().splitlines()
        if not lines:
            return cls("it printed nothing")
        ours = [number for number, line in enumerate(lines) if line.startswith(LAST_WORDS)]
        if not ours:
            return cls(lines[-1])
        return cls(lines[ours[-1]], "\n".join(lines[ours[-1] + 1 :]))

    @property
    def reason(self) -> str:
        """Return the words without the name of the process."""
        return self.words.partition(": ")[2] if self.words.startswith(LAST_WORDS) else self.words

    def failure(self, kind: type[SeedrlError], message: str) -> SeedrlError:
        """Return the error to raise because of this end; people see the traceback below its message."""
        failure = kind(message)
        failure.traceback = self.traceback
        return failure


class Crashes:
    """The recent crashes of one role: at most `limit`, and each delays the next start a little more."""

    def __init__(self, limit: int, slowest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._slowest = slowest  # longest delay, seconds
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
        """Return the seconds to wait before the next start."""
        return min(self._slowest, 0.5 * self.count)

    @property
    def summary(self) -> str:
        return f"crashed {self.count} times within {CRASH_SECONDS / 60:.0f} minutes"


class Child:
    """One process of a role and its successors. Owned by the supervisor."""

    def __init__(self, name: str, start: Callable[[], Process]) -> None:
        self.name = name
        self._start = start
        self._due: float | None = None
        self.process: Process | None = None
        self.starts = 0
        self.exit_code: int | None = None  # of the previous process
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
        """Return whether a restart is scheduled."""
        return self._due is not None

    def start_if_due(self) -> bool:
        """Start it if the time has come; return whether it was started."""
        if self._due is None or time.monotonic() < self._due:
            return False
        self.start()
        return True

    def ended(self) -> int | None:
        """Return the exit code if the process has ended and no restart is scheduled; negative: ended by a signal."""
        if self._due is not None or self.process is None:
            return None
        return self.process.poll()

    def ask_to_end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal if it runs."""
        if self.process is not None and self.is_running:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it and everything it has started, if it runs."""
        if self.process is not None and self.is_running:
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, deadline: float) -> None:
        """Wait for its end until the deadline, then kill it."""
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
    """Return the name of the signal that ended a process with this exit code; empty if none did."""
    number = -code if code < 0 else code - 128
    return signal.Signals(number).name if number in set(signal.Signals) else ""


def start_module(module: str, *arguments: str, orphaned: int = signal.SIGTERM, **options: Any) -> Process:
    """Start a child that gets no signals from the terminal; `orphaned` is the signal it gets if this process dies."""
    command = [sys.executable, "-m", module, *arguments]
    before = partial(end_with_parent, orphaned, os.getpid())
    return subprocess.Popen(command, start_new_session=True, preexec_fn=before, **options)


def end_with_parent(number: int = signal.SIGTERM, parent: int = 0) -> None:
    """Let this process get a signal when its parent dies, or the thread that started it. For preexec_fn."""
    if hasattr(LIBC, "prctl"):  # Linux
        LIBC.prctl(PR_SET_PDEATHSIG, number)
    if parent and os.getppid() != parent:  # it has died before that
        os._exit(1)
