"""A chaos run: real processes on counting environments under a seeded schedule of faults.

python -m tests.chaos.run seconds=60 seed=7 [actors=4] [size=5] [stretch=8] [out=DIR]

Prints the schedule, what happens, and a report; exits with 1 if something is broken. The same seed gives the same
schedule. With `stretch` it first measures updates/s in turns of so many seconds, undisturbed and with one actor killed
and restarted again and again.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.cluster import Cluster, Setup, keep_logs, wait_until
from tests.chaos.disturb import Disturbance
from tests.chaos.faults import Fault, Kind, schedule
from tests.chaos.ledger import Ledger
from tests.chaos.report import Stretch, chaos_report, markdown, write
from tests.chaos.settings import from_words

TURNS = 2  # of each kind of stretch
CHURN_SECONDS = 2.0  # between kills of one actor
CALM_SECONDS = 3.0  # at the end, in which training has to go on
LOOK_SECONDS = 0.5
WAITED = 'seedrl_learner_seconds_total{stage="wait"}'


@dataclass(frozen=True, slots=True)
class ChaosSettings:
    seconds: float = 60.0
    seed: int = 7
    actors: int = 4
    size: int = 5
    stretch: float = 8.0
    out: str = ""


def main(*words: str) -> int:
    settings = from_words(ChaosSettings, words)
    report = run_chaos(settings)
    print(markdown(report))
    if settings.out:
        write(report, Path(settings.out), "chaos")
    return 1 if report["broken"] else 0


def run_chaos(settings: ChaosSettings, say: Callable[[str], None] = print) -> dict[str, Any]:
    """The report; `broken` in it lists what may not be."""
    faults = schedule(settings.seed, settings.seconds, settings.actors)
    say(f"chaos: seed {settings.seed}, {settings.seconds:g} s, {len(faults)} faults; load {os.getloadavg()[0]:.1f}")
    for fault in faults:
        say(f"  {fault}")
    with tempfile.TemporaryDirectory(prefix="seedrl-chaos-") as name:
        directory = Path(name)
        with Cluster(
            directory, Setup(actors=settings.actors, size=settings.size, spare=settings.actors // 2)
        ) as cluster:
            run = Run(cluster, say)
            report = run.report(settings, faults)
        if report["broken"]:
            keep_logs(directory, Path("runs/chaos-logs"))
    return report


class Run:
    """One chaos run on a cluster that is just starting."""

    def __init__(self, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._say = say
        self._ledger = Ledger()
        self._disturbance = Disturbance(cluster, say)
        self._next_look = 0.0
        self._updates_after = 0.0  # the last fault

    def report(self, settings: ChaosSettings, faults: list[Fault]) -> dict[str, Any]:
        cluster, disturbance = self._cluster, self._disturbance
        started = wait_until(cluster.all_stream, "all actors stream")
        self._say(f"chaos: everything streams after {started:.1f} s")
        rates = self._measure(settings.stretch) if settings.stretch else {}
        disturbance.run(faults, settings.seconds, self._look)
        disturbance.recover(self._look)
        self._go_on_in_peace()
        pids = [cluster.learner.pid, *(actor.pid for actor in cluster.actors)]
        left = cluster.stop()
        self._next_look = 0.0
        self._look()  # the last checkpoint
        broken = {
            "violations": cluster.violations(),
            "processes that ended": [*cluster.exits, *left],
            "processes left behind": [str(pid) for pid in pids if Path(f"/proc/{pid}").exists()],
            "counters that fell": self._ledger.fallen,
            "actors that did not recover": [str(each) for each in disturbance.waiting.values()],
            "training": [] if self._updates_after > 0 else ["no update after the last fault"],
        }
        return chaos_report(
            settings, disturbance, rates, self._ledger, cluster.checkpoint(), broken, self._updates_after
        )

    def _look(self) -> None:
        """Counters, now and then."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            cluster = self._cluster
            checkpoint = cluster.checkpoint()  # first: what is running now has not done less
            self._ledger.look(cluster.learner_starts, cluster.learner_numbers(), checkpoint)

    def _measure(self, seconds: float) -> dict[str, list[Stretch]]:
        """Undisturbed and under churn, in turns."""
        rates: dict[str, list[Stretch]] = {"undisturbed": [], "churn": []}
        for turn in range(TURNS):
            rates["undisturbed"].append(self._rate([], seconds))
            kills = [Fault(at, Kind.kill, turn) for at in _range(0.0, seconds, CHURN_SECONDS)]
            rates["churn"].append(self._rate(kills, seconds))
            self._disturbance.recover(self._look)
        return rates

    def _rate(self, faults: list[Fault], seconds: float) -> Stretch:
        before, began = self._cluster.learner_numbers(), time.monotonic()
        self._disturbance.run(faults, seconds, self._look)
        after, passed = self._cluster.learner_numbers(), time.monotonic() - began
        updates, waited = (after[name] - before[name] for name in ("seedrl_updates_total", WAITED))
        stretch = Stretch(round(updates / passed, 2), round(waited / passed, 4))
        self._say(f"chaos: {stretch} with {len(faults)} kills in {seconds:g} s")
        return stretch

    def _go_on_in_peace(self) -> None:
        before = self._cluster.updates()
        self._disturbance.run([], CALM_SECONDS, self._look)
        self._updates_after = self._cluster.updates() - before


def _range(begin: float, end: float, step: float) -> list[float]:
    return [begin + number * step for number in range(int((end - begin) / step))]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
