"""A3: a half-open link is noticed within 15 s on both sides. A12: loss and latency make it slower, never wrong."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.cluster import ROOT, Setup, learner_settings, wait_until
from tests.chaos.namespaces import Namespace
from tests.chaos.proxy import Proxy
from tests.integration.processes import Process
from tests.integration.waiting import free_address

NOTICED_SECONDS = 15.0
LOSS = 0.05
LATENCY = 0.05

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]


class Processes:
    """A learner and actors that may be in a namespace; ended after the test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[Process] = []
        self.violations = directory / "violations.jsonl"
        self.rows = directory / "run" / "metrics.jsonl"

    def start(self, prefix: list[str], *words: str) -> Process:
        command = [*prefix, sys.executable, "-m", *words]
        environment = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self._started.append(Process(command, self._directory, len(self._started), environment))
        return self._started[-1]

    def learner(self, prefix: list[str], listen: str) -> Process:
        settings = learner_settings(Setup(actors=2, update_seconds=0.0), self.violations)
        words = ("seedrl", "learner", *settings, f"run_dir={self._directory / 'run'}", f"listen={listen}", "metrics=")
        return self.start(prefix, *words)

    def actor(self, prefix: list[str], learner: str, number: int = 0) -> Process:
        words = ("seedrl", "actor", f"learner={learner}", f"name=actor-{number}", "modules=[tests.chaos.counting]")
        return self.start(prefix, *words)

    def updates(self) -> int:
        """Return the number of updates in the newest row of the run."""
        lines = self.rows.read_text().splitlines() if self.rows.exists() else []
        return int(json.loads(lines[-1])["updates"]) if lines else 0

    def end(self) -> None:
        for process in reversed(self._started):
            process.end()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    started = Processes(tmp_path)
    yield started
    started.end()


def notice_and_rejoin(processes: Processes, learner: Process, actor: Process, lose: Callable[[], None]) -> None:
    """The link is lost in mid-stream; both ends say so in time."""
    wait_until(lambda: processes.updates() > 0 or not learner.is_running, "updates")
    failures = actor.out.count("trying again")  # before the learner was there
    lost = time.monotonic()
    lose()
    noticed: dict[str, float] = {}

    def both_noticed() -> bool:
        seconds = time.monotonic() - lost
        if any(words in learner.out for words in ("actor-0 left", "ended the session of actor-0")):  # by the next one
            noticed.setdefault("learner", seconds)
        if actor.out.count("trying again") > failures:
            noticed.setdefault("actor", seconds)
        return len(noticed) == 2

    wait_until(both_noticed, f"both ends notice; {noticed}")
    print({end: f"{seconds:.1f} s" for end, seconds in noticed.items()})
    assert max(noticed.values()) <= NOTICED_SECONDS


def go_on(processes: Processes, learner: Process) -> None:
    wait_until(lambda: learner.out.count("actor-0 joined") == 2, "the actor joins again")
    before = processes.updates()
    wait_until(lambda: processes.updates() > before + 10, "training goes on")
    assert not processes.violations.exists()


def test_half_open_link_in_a_namespace_is_noticed_on_both_sides(processes: Processes) -> None:
    with Namespace() as network:
        address = "127.0.0.1:50051"
        learner = processes.learner(network.prefix, address)
        actor = processes.actor(network.prefix, address)
        notice_and_rejoin(processes, learner, actor, lambda: network.lose(1))
        network.heal()
        go_on(processes, learner)
        processes.end()


def test_half_open_link_in_a_black_hole_is_noticed_on_both_sides(processes: Processes) -> None:
    address = free_address()
    with Proxy(address) as proxy:
        learner = processes.learner([], address)
        actor = processes.actor([], proxy.address)
        notice_and_rejoin(processes, learner, actor, proxy.black_hole)
        go_on(processes, learner)
        processes.end()


def test_loss_and_latency_slow_training_down_and_break_nothing(processes: Processes) -> None:
    address, slow_address = "127.0.0.1:50051", "127.0.0.1:50052"
    with Namespace() as network:
        learner = processes.learner(network.prefix, address)
        proxy = processes.start(network.prefix, "tests.chaos.proxy", slow_address, address, f"delay={LATENCY}")
        proxy.says("proxy:")
        actors = [processes.actor(network.prefix, slow_address, number) for number in range(2)]
        wait_until(lambda: processes.updates() > 0 or not learner.is_running, "updates")
        rates = {"latency": updates_per_second(processes)}
        network.lose(LOSS)
        rates["latency and loss"] = updates_per_second(processes, seconds=20)
        print({condition: f"{rate:.1f} updates/s" for condition, rate in rates.items()})
        assert min(rates.values()) > 0
        assert all(process.is_running for process in (learner, *actors)), learner.err
        assert "left" not in learner.out, "a session was lost"
        assert not processes.violations.exists()
        processes.end()


def updates_per_second(processes: Processes, seconds: float = 5.0) -> float:
    before, began = processes.updates(), time.monotonic()
    time.sleep(seconds)
    return (processes.updates() - before) / (time.monotonic() - began)
