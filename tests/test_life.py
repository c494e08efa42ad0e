"""Tests of the progress of a learner, as its pages and probes show it."""

import time
from types import SimpleNamespace

from seedrl.monitoring.life import WEDGED_SECONDS, Life, Running
from seedrl.monitoring.pages import learner_pages


def running(silent_seconds: float) -> Running:
    store, policy = SimpleNamespace(ready=3, capacity=12), SimpleNamespace(version=7)
    return Running(store, 100, policy, SimpleNamespace(alive_at=time.monotonic() - silent_seconds))


def test_life_goes_from_waiting_to_running_to_draining() -> None:
    life = Life()
    states = [life.state]
    life.is_ready = True
    states.append(life.state)
    life.is_draining = True
    assert [*states, life.state] == ["waiting", "running", "draining"]


def test_life_without_batches_for_long_is_over_while_rows_wait() -> None:
    life = Life(running=running(WEDGED_SECONDS + 1))
    assert not life.is_alive
    life.is_draining = True  # batches end before the last checkpoint is written
    assert life.is_alive


def test_life_before_it_serves_and_with_a_recent_batch_is_alive() -> None:
    assert Life().is_alive
    assert Life().policy_version == 0
    assert Life(running=running(1.0)).is_alive
    assert Life(running=running(1.0)).policy_version == 7


def test_pages_of_probes_follow_the_life_of_the_learner() -> None:
    life = Life(running=running(WEDGED_SECONDS + 1))
    nothing = SimpleNamespace()
    pages = learner_pages(nothing, nothing, nothing, life)  # type: ignore[arg-type]
    assert (pages["/healthz"]().status, pages["/readyz"]().status) == (503, 503)
    assert b"no batch has run for 61 s" in pages["/healthz"]().content
    life.running, life.is_ready = running(0.0), True
    assert (pages["/healthz"]().status, pages["/readyz"]().status) == (200, 200)
