"""The end of a process: whether, how and why it stops, and the signals that request it. Knows nothing of what stops."""

import math
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from seedrl.config import StopConfig
from seedrl.errors import RankLost
from seedrl.metrics import ServingMetrics

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EPISODES = 100  # a mean return of fewer is too noisy to stop for


class Progress(NamedTuple):
    """The progress of a run, or of one rank's part of it."""

    env_steps: int = 0
    episodes: int = 0
    return_sum: float = 0.0  # of the last hundred episodes, or of a rank's share of them
    return_count: int = 0

    @property
    def return_mean(self) -> float | None:
        return self.return_sum / self.return_count if self.return_count else None

    @classmethod
    def of(cls, serving: ServingMetrics, ranks: int = 1) -> "Progress":
        """Return this process's part; of the last hundred episodes each of `ranks` counts its share."""
        newest = list(serving.returns.copy())  # the server thread may add to it
        returns = newest[-math.ceil(EPISODES / ranks) :]
        return cls(serving.env_steps, serving.episodes, sum(returns), len(returns))


class Stop:
    """The request to stop, and its outcome. Thread-safe; `on_stop` is called once, by the thread that asks first.

    The first request gives the status and the reason. A failure outweighs every request, also one that came before it:
    a process that fails while it stops has not ended well. Of several failures the first counts, as others follow it.
    """

    def __init__(self, on_stop: Callable[[], None] = lambda: None) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._on_stop = on_stop
        self.status = ""
        self.reason = ""
        self.failure: BaseException | None = None

    def ask(self, status: str, reason: str) -> None:
        """Request an orderly stop."""
        with self._lock:
            if self._event.is_set():
                return
            self.status, self.reason = status, reason
            self._event.set()
        self._on_stop()

    def ask_if_done(self, reason: str) -> bool:
        """Ask to stop because the goal is reached, unless the reason is empty; return whether it is reached."""
        if reason:
            self.ask("done", reason)
        return bool(reason)

    def fail(self, failure: BaseException) -> None:
        """Stop with a failure, which makes an orderly stop that is under way a failure, too."""
        with self._lock:
            if self.failure is not None:
                return
            self.status, self.reason, self.failure = "failed", str(failure), failure
            is_first = not self._event.is_set()
            self._event.set()
        if is_first:
            self._on_stop()

    def obey(self, status: str, reason: str) -> None:
        """Stop because another rank stops: with a failure if that rank failed."""
        if status == "failed":
            self.fail(RankLost(reason))
        else:
            self.ask(status, reason)

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)


def stop_on_signals(stop: Stop, say: Callable[[str], None]) -> None:
    """Let SIGINT and SIGTERM request an orderly stop; a second signal ends the process at once."""
    signals: list[int] = []

    def interrupt(reason: str) -> None:
        stop.ask("interrupted", reason)
        say(f"learner: {reason}; stopping cleanly; a second signal, such as another Ctrl-C, ends it at once")

    def handle(number: int, _: Any) -> None:
        signals.append(number)
        if len(signals) > 1:
            os._exit(128 + number)
        # In a thread of its own: the interrupted one may hold the locks that this takes.
        reason = f"Interrupted by {signal.Signals(number).name}"
        threading.Thread(target=interrupt, args=(reason,), name="stop").start()

    handle_signals(handle)


def handle_signals(handle: Callable[[int, Any], None]) -> None:
    """Let this handle SIGINT and SIGTERM, also if the process was started with them blocked, as Ray's threads do."""
    for number in SIGNALS:
        signal.signal(number, handle)
    if hasattr(signal, "pthread_sigmask"):  # not on Windows, where no signal can be blocked
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def reached_goal(goal: StopConfig, progress: Progress) -> str:
    """Return in words why training is over; empty while it is not."""
    score, target = progress.return_mean, goal.return_mean_100
    if target is not None and score is not None and score >= target and progress.return_count >= EPISODES:
        return f"Solved: mean return {score:.2f} reached the target of {target:g}"
    if progress.env_steps >= goal.env_steps:
        return f"Done: {progress.env_steps:,} of {goal.env_steps:,} steps"
    return ""
