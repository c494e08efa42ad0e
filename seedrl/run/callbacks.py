"""The user's own code that follows a run: classes by import path, called with events in a thread of their own.

The threads that serve and train only put events into a bounded queue, so callbacks can neither block nor break them.
If the queue is full an event is dropped and counted. Knows nothing of where events come from.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from seedrl import plugins
from seedrl.config import LearnerConfig
from seedrl.errors import ConfigError, SeedrlError
from seedrl.metrics import LearningMetrics
from seedrl.tracebacks import failed

QUEUED = 1024  # events that may wait; an event takes a few hundred bytes


class Update(NamedTuple):
    """A train batch has been trained on, and the weights are served."""

    updates: int
    env_steps: int  # of all ranks, like the next two
    episodes: int
    return_mean_100: float | None  # of the last hundred episodes; None before the first one
    values: dict[str, float]  # the newest numbers that the algorithm has reported, by name


class Episode(NamedTuple):
    """An episode has ended."""

    episode_return: float  # undiscounted and unclipped
    length: int  # steps
    env_steps: int  # of this process, when it ended
    is_evaluation: bool


class MemberChange(NamedTuple):
    """An actor has joined or left."""

    name: str
    session: int
    envs: int
    has_joined: bool  # false: it has left


class Callback:
    """The methods that a callback can have: all are optional, and none has to inherit from here."""

    def __init__(self, run_dir: Path, **options: Any) -> None: ...

    def on_update(self, update: Update) -> None: ...

    def on_episode(self, episode: Episode) -> None: ...

    def on_checkpoint(self, path: Path) -> None: ...

    def on_member(self, change: MemberChange) -> None: ...


METHODS = ("on_update", "on_episode", "on_checkpoint", "on_member")
Listener = Callable[[Any], None]


class Callbacks:
    """All callbacks of a process. `start` and `close` belong to the main thread; listeners are for any thread."""

    def __init__(
        self, config: LearnerConfig, run_dir: Path, learning: LearningMetrics, say: Callable[[str], None]
    ) -> None:
        """Import and build the callbacks; raise ConfigError if that fails."""
        self._learning = learning
        self._say = say
        built = [_build(path, run_dir, config.callback_options) for path in config.callbacks]
        self._called = {name: [each for each in built if hasattr(each, name)] for name in METHODS}
        self._queue: queue.Queue[tuple[str, Any] | None] = queue.Queue(QUEUED)
        self._counting = threading.Lock()
        self._has_failed: set[tuple[str, str]] = set()  # class and method, in the thread of callbacks
        self._is_closed = False  # for new events
        self._is_over = False  # also for those that wait
        # A daemon only so that a callback that never returns cannot keep the process; it is joined in `close`.
        self._thread = threading.Thread(target=self._run, name="callbacks", daemon=True) if built else None

    def listener(self, method: str) -> Listener | None:
        """Return what takes the events for a method; None if no callback has it, so that no event need be made."""
        return (lambda event: self._note(method, event)) if self._called[method] else None

    def start(self) -> None:
        if self._thread is not None:
            self._thread.start()

    def close(self, seconds: float) -> None:
        """Let the callbacks finish the events that wait, for as long as this; drop and count the others."""
        if self._thread is None or not self._thread.is_alive():
            return
        deadline, self._is_closed = time.monotonic() + seconds, True
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=seconds)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._is_over = True
        if self._thread.is_alive():
            dropped = sum(item is not None for item in list(self._queue.queue))
            self._count_dropped(dropped)
            self._say(f"learner: callbacks did not end within {seconds:.0f} s; {dropped} events are dropped")

    def _note(self, method: str, event: Any) -> None:
        """Runs in the thread where an event is born."""
        try:
            if self._is_closed:
                raise queue.Full
            self._queue.put_nowait((method, event))
        except queue.Full:
            self._count_dropped(1)

    def _count_dropped(self, events: int) -> None:
        with self._counting:
            self._learning.callback_events_dropped += events

    # In the thread of callbacks.

    def _run(self) -> None:
        while (item := self._queue.get()) is not None and not self._is_over:
            method, event = item
            for callback in self._called[method]:
                self._call(callback, method, event)

    def _call(self, callback: Any, method: str, event: Any) -> None:
        try:
            getattr(callback, method)(event)
        except BaseException as error:  # SystemExit included: a callback does not decide about the run
            self._learning.callback_failures += 1
            self._log_once(type(callback).__name__, method, error)

    def _log_once(self, name: str, method: str, error: BaseException) -> None:
        if (name, method) in self._has_failed:
            return
        self._has_failed.add((name, method))
        failure = failed(SeedrlError, f"callback {name}.{method} failed", error)
        self._say(
            f"learner: {failure}; it is called again with the next event, and further failures are only counted\n"
            + failure.traceback
        )


def _build(path: str, run_dir: Path, options: dict[str, Any]) -> Any:
    if not plugins.is_import_path(path):
        raise ConfigError(f"callbacks=[{path}] must be your.module:Class")
    callback = plugins.build("callbacks", path, run_dir, **options.get(class_name(path), {}))
    if not any(hasattr(callback, name) for name in METHODS):
        raise ConfigError(f"callbacks=[{path}] has none of the methods {', '.join(METHODS)}")
    return callback


def class_name(path: str) -> str:
    return path.partition(":")[2]
