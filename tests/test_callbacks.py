"""Callbacks: what they are called with, and that nothing they do reaches the threads that make events."""

import queue
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seedrl.config import LearnerConfig
from seedrl.errors import ConfigError
from seedrl.metrics import LearningMetrics
from seedrl.run import callbacks as module
from seedrl.run.callbacks import Callbacks, Episode, MemberChange
from seedrl.validation import check
from tests.integration.waiting import DEADLINE

EPISODE = Episode(episode_return=1.0, length=5, env_steps=10, is_evaluation=False)


class Collects:
    """Keeps what it is called with."""

    built: "list[Collects]"

    def __init__(self, run_dir: Path, **options: Any) -> None:
        self.run_dir, self.options = run_dir, options
        self.seen: queue.Queue[Any] = queue.Queue()
        self.built.append(self)

    def on_episode(self, episode: Episode) -> None:
        self.seen.put((episode, threading.current_thread().name))


class Fails:
    """Raises whatever it is called with."""

    def __init__(self, run_dir: Path) -> None: ...

    def on_episode(self, episode: Episode) -> None:
        raise ArithmeticError("this callback cannot count")

    def on_member(self, change: MemberChange) -> None:
        raise SystemExit("this callback has had enough")


class Hangs:
    """Does not return before it is let go."""

    is_in: threading.Event
    may_return: threading.Event

    def __init__(self, run_dir: Path) -> None: ...

    def on_episode(self, episode: Episode) -> None:
        self.is_in.set()
        self.may_return.wait(DEADLINE)


class Nothing:
    def __init__(self, run_dir: Path) -> None: ...


def built(paths: list[str], options: dict[str, Any], learning: LearningMetrics, said: list[str]) -> Callbacks:
    config = LearnerConfig(callbacks=paths, callback_options=options)
    check(config)
    return Callbacks(config, Path("run"), learning, said.append)


class Started:
    """Callbacks of some classes, with what they count and say."""

    def __init__(self, *classes: type, options: dict[str, Any] | None = None) -> None:
        paths = [f"{__name__}:{each.__name__}" for each in classes]
        self.learning = LearningMetrics()
        self.said: list[str] = []
        self.callbacks = built(paths, options or {}, self.learning, self.said)
        self.callbacks.start()

    def note(self, method: str = "on_episode", event: Any = EPISODE) -> None:
        listener = self.callbacks.listener(method)
        assert listener is not None
        listener(event)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Collects, "built", [], raising=False)
    monkeypatch.setattr(Hangs, "is_in", threading.Event(), raising=False)
    monkeypatch.setattr(Hangs, "may_return", threading.Event(), raising=False)
    before = set(threading.enumerate())
    yield
    Hangs.may_return.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(DEADLINE)
    assert not [each for each in threading.enumerate() if each.name == "callbacks"]


def test_callbacks_are_built_with_their_options_and_called_in_their_own_thread() -> None:
    started = Started(Collects, options={"Collects": {"key": 1}})
    started.note()
    started.callbacks.close(DEADLINE)
    [collects] = Collects.built
    assert (collects.run_dir, collects.options) == (Path("run"), {"key": 1})
    assert collects.seen.get_nowait() == (EPISODE, "callbacks")
    assert started.learning.callback_events_dropped == 0


def test_callbacks_without_a_method_cost_no_event() -> None:
    """What makes events asks first, and without callbacks there is not even a thread."""
    started = Started(Collects)
    assert started.callbacks.listener("on_update") is None
    started.callbacks.close(DEADLINE)
    nothing = Started()
    assert all(nothing.callbacks.listener(method) is None for method in module.METHODS)
    nothing.callbacks.close(DEADLINE)
    assert "callbacks" not in {thread.name for thread in threading.enumerate()}


def test_callback_that_fails_is_logged_once_counted_and_called_again() -> None:
    started = Started(Fails, Collects)
    for _ in range(3):
        started.note()
        started.note("on_member", MemberChange("actor-0", 1, 4, has_joined=True))
    started.callbacks.close(DEADLINE)
    assert started.learning.callback_failures == 6
    assert Collects.built[0].seen.qsize() == 3
    [episode, member] = started.said
    assert re.match(
        r"learner: tests/test_callbacks\.py:\d+ in on_episode: callback Fails\.on_episode failed: Arith", episode
    )
    assert "Traceback" in episode
    assert "this callback cannot count" in episode
    assert "SystemExit" in member


def test_callback_that_hangs_drops_events_and_blocks_neither_their_threads_nor_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "QUEUED", 2)
    started = Started(Hangs)
    started.note()
    assert Hangs.is_in.wait(DEADLINE)
    for _ in range(5):
        started.note()  # two of them wait
    assert started.learning.callback_events_dropped == 3
    started.callbacks.close(0.01)
    assert started.learning.callback_events_dropped == 5
    started.note()
    assert started.learning.callback_events_dropped == 6
    assert started.said == ["learner: callbacks did not end within 0 s; 2 events are dropped"]


@pytest.mark.parametrize(
    ("callbacks", "options", "words"),
    [
        (["tests.nowhere:Journal"], {}, r"callbacks=tests\.nowhere:Journal: there is no module tests\.nowhere"),
        (["journal"], {}, r"callbacks=\[journal\] must be your\.module:Class"),
        ([f"{__name__}:Nothing"], {}, r"has none of the methods on_update, on_episode"),
        ([f"{__name__}:Collects"], {"Other": {}}, r"callback_options has Other, which is no class of callbacks="),
        ([f"{__name__}:Collects"], {"Collects": 1}, r"callback_options\.Collects=1 must be \{key: value\}"),
        ([f"{__name__}:Fails"], {"Fails": {"key": 1}}, r"could not be built: .* unexpected keyword argument 'key'"),
    ],
)
def test_callbacks_that_cannot_be_built_are_refused_by_name(
    callbacks: list[str], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        built(callbacks, options, LearningMetrics(), [])
