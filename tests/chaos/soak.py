"""A soak: the set-up of a chaos run for as long as it takes, with one fault of an actor every 30 s.

python -m tests.chaos.soak minutes=30 [seed=7] [pause=30] [actors=4] [out=docs]

Writes soak.json, soak.md and soak.png: throughput of each tenth against the first, what the processes hold, and how
that grows. The learner is never killed here: its memory is what is watched.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from tests.chaos.cluster import Cluster, Resources, Setup, keep_logs, resources, wait_until
from tests.chaos.disturb import Disturbance
from tests.chaos.faults import every
from tests.chaos.ledger import Ledger
from tests.chaos.report import recoveries, table, write
from tests.chaos.settings import from_words

THROUGHPUT = 0.03  # promised: a tenth may be so much slower than the first
SLOPE = 0.01  # promised: of RSS, per hour
WARM_UP = 0.2  # of the time: memory may still grow
TENTHS = 10
SETTLE_SECONDS = 60.0
MIB = 2**20


@dataclass(frozen=True, slots=True)
class SoakSettings:
    minutes: float = 30.0
    seed: int = 7
    pause: float = 30.0  # seconds between faults
    actors: int = 4
    out: str = "docs"


@dataclass(frozen=True, slots=True)
class Sample:
    """A look at everything."""

    seconds: float  # since the soak began
    updates: float
    steps: float
    learner: Resources
    actors: list[Resources]  # of those that can be seen


def main(*words: str) -> int:
    settings = from_words(SoakSettings, words)
    report, samples = run_soak(settings)
    page = soak_page(report)
    out = Path(settings.out)
    write(report, out, "soak", page)
    draw(samples, report, out / "soak.png")
    print(page)
    return 1 if report["broken"] else 0


def run_soak(settings: SoakSettings, say: Callable[[str], None] = print) -> tuple[dict[str, Any], list[Sample]]:
    """The report and what it is made of; `broken` in it lists what may not be."""
    seconds = 60 * settings.minutes
    faults = every(settings.seed, seconds, settings.pause, settings.actors)
    say(
        f"soak: {settings.minutes:g} minutes, seed {settings.seed}, {len(faults)} faults; load {os.getloadavg()[0]:.1f}"
    )
    with tempfile.TemporaryDirectory(prefix="seedrl-soak-") as directory:
        setup = Setup(actors=settings.actors, checkpoint_seconds=10.0)
        with Cluster(Path(directory), setup) as cluster:
            disturbance, watch = Disturbance(cluster, say), Watch(cluster, seconds)
            wait_until(cluster.all_stream, "all actors stream")
            watch.begin()
            disturbance.run(faults, seconds, watch.look)
            disturbance.recover(watch.look)
            watch.settle()
            violations, exits = cluster.violations(), list(cluster.exits)
            exits += cluster.stop()
        report = soak_report(settings, disturbance, watch)
        report["broken"] += [*violations, *exits, *watch.ledger.fallen, *map(str, disturbance.waiting.values())]
        if report["broken"]:
            keep_logs(Path(directory), Path("runs/soak-logs"))
    return report, watch.samples


class Watch:
    """Samples a cluster, a thousand times at most."""

    def __init__(self, cluster: Cluster, seconds: float) -> None:
        self._cluster = cluster
        self._pause = max(0.5, seconds / 1000)
        self._next = 0.0
        self._began = 0.0
        self.ledger = Ledger()
        self.samples: list[Sample] = []
        self.before = self.after = Resources(0, 0, 0, 0.0)  # of the learner, with all actors streaming

    def begin(self) -> None:
        self._began = time.monotonic()
        self.before = resources(self._cluster.learner.pid)

    def look(self) -> None:
        now = time.monotonic()
        numbers = self._cluster.learner_numbers() if now >= self._next else {}
        if "seedrl_updates_total" not in numbers:
            return
        self._next = now + self._pause
        self.ledger.look(1, numbers, self._cluster.checkpoint())
        learner, actors = resources(self._cluster.learner.pid), []
        for actor in self._cluster.actors:
            if actor.is_running:
                actors.append(resources(actor.pid))
        updates, steps = numbers["seedrl_updates_total"], numbers["seedrl_env_steps_total"]
        self.samples.append(Sample(now - self._began, updates, steps, learner, actors))

    def settle(self) -> None:
        """Waits until the learner holds no more than at the beginning; it may still be closing what was lost."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            self.after = resources(self._cluster.learner.pid)
            if self.after.descriptors <= self.before.descriptors and self.after.threads <= self.before.threads:
                return
            time.sleep(1.0)


def soak_report(settings: SoakSettings, disturbance: Disturbance, watch: Watch) -> dict[str, Any]:
    samples = watch.samples
    tenths = by_tenth(samples)
    rates = [tenth["updates_per_second"] for tenth in tenths]
    worst = 1 - min(rates) / rates[0]
    slope = rss_slope(samples)
    before, after = watch.before, watch.after
    broken = []
    if worst > THROUGHPUT:
        broken.append(f"throughput of a tenth is {worst:.1%} below the first; promised {THROUGHPUT:.0%}")
    if slope > SLOPE:
        broken.append(f"RSS of the learner grows by {slope:.1%} an hour; promised {SLOPE:.0%}")
    for name in ("descriptors", "threads"):
        if getattr(after, name) > getattr(before, name):
            broken.append(f"{name}: {getattr(before, name)} at first, {getattr(after, name)} in the end")
    return {
        "settings": asdict(settings),
        "load": [round(load, 1) for load in os.getloadavg()],
        "seconds": round(samples[-1].seconds, 1),
        "faults": len(disturbance.injected),
        "recoveries": recoveries(disturbance),
        "updates": samples[-1].updates,
        "env_steps": samples[-1].steps,
        "tenths": tenths,
        "worst_tenth": round(worst, 4),
        "rss_slope_per_hour": round(slope, 4),
        "learner_before": before._asdict(),
        "learner_after": after._asdict(),
        "broken": broken,
    }


def by_tenth(samples: Sequence[Sample]) -> list[dict[str, float]]:
    """Return what happened in each tenth of the time."""
    end = samples[-1].seconds
    bounds = [min(samples, key=lambda each: abs(each.seconds - end * n / TENTHS)) for n in range(TENTHS + 1)]
    return [_tenth(before, after) for before, after in pairwise(bounds)]


def _tenth(before: Sample, after: Sample) -> dict[str, float]:
    seconds, steps = after.seconds - before.seconds, after.steps - before.steps
    cpu = after.learner.cpu_seconds - before.learner.cpu_seconds
    return {
        "updates_per_second": round((after.updates - before.updates) / seconds, 3),
        "steps_per_second": round(steps / seconds, 1),
        "learner_cpu_microseconds_per_step": round(1e6 * cpu / steps, 1),
        "learner_rss_mib": round(after.learner.rss / MIB, 1),
        "actor_rss_mib": round(statistics.mean(actor.rss for actor in after.actors) / MIB, 1) if after.actors else 0.0,
    }


def rss_slope(samples: Sequence[Sample]) -> float:
    """Growth of the learner's memory per hour, as a share of it: least squares after the warm-up."""
    warm = [each for each in samples if each.seconds >= WARM_UP * samples[-1].seconds]
    hours = np.array([each.seconds for each in warm]) / 3600
    rss = np.array([each.learner.rss for each in warm], np.float64)
    slope = np.polyfit(hours, rss, 1)[0]
    return float(slope / rss.mean())


def soak_page(report: dict[str, Any]) -> str:
    settings, before, after = report["settings"], report["learner_before"], report["learner_after"]
    figures = [
        ("updates/s of the slowest tenth below the first", f"{report['worst_tenth']:.1%}", f"≤ {THROUGHPUT:.0%}"),
        ("RSS of the learner, growth per hour", f"{report['rss_slope_per_hour']:.2%}", f"< {SLOPE:.0%}"),
        ("descriptors of the learner, first and last", f"{before['descriptors']}, {after['descriptors']}", "no more"),
        ("threads of the learner, first and last", f"{before['threads']}, {after['threads']}", "no more"),
    ]
    recovered = [(name, *each.values()) for name, each in report["recoveries"].items()]
    lines = [
        f"# Soak of {report['seconds'] / 60:.1f} minutes",
        "",
        f"{settings['actors']} actors on counting environments, {report['faults']} faults of them, one every "
        f"{settings['pause']:g} s (seed {settings['seed']}); {report['updates']:,.0f} updates, "
        f"{report['env_steps']:,.0f} steps. Load of the machine at the end: {report['load'][0]}. An update includes "
        f"{Setup().update_seconds:g} s in which it uses no processor, as an accelerator would.",
        "",
        "![updates/s and memory over time](soak.png)",
        "",
        *table(("figure", "measured", "promised"), figures),
        "",
        *table(("tenth", *report["tenths"][0]), [(n, *each.values()) for n, each in enumerate(report["tenths"], 1)]),
        "",
        *table(("fault", "recoveries", "median s", "worst s"), recovered),
        "",
        *(f"BROKEN {words[:500]}" for words in report["broken"][:20]),
    ]
    return "\n".join(lines)


def draw(samples: Sequence[Sample], report: dict[str, Any], out: Path) -> None:
    """updates/s by tenth, and memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 3.4), layout="constrained")
    rates, memory = figure.subplots(1, 2)
    minutes = [sample.seconds / 60 for sample in samples]
    tenths = [tenth["updates_per_second"] for tenth in report["tenths"]]
    rates.stairs(tenths, np.linspace(0, minutes[-1], TENTHS + 1), color="#0072B2", label="a tenth")
    band = [tenths[0] * (1 - THROUGHPUT), tenths[0] * (1 + THROUGHPUT)]
    rates.axhspan(*band, color="#0072B2", alpha=0.15, label="promised")
    rates.set(xlabel="minutes", ylabel="updates/s", ylim=(0, 1.2 * max(tenths)))
    memory.plot(minutes, [sample.learner.rss / MIB for sample in samples], color="#D55E00", label="learner")
    actors = [statistics.mean(each.rss for each in sample.actors) / MIB if sample.actors else 0 for sample in samples]
    memory.plot(minutes, actors, color="#009E73", linestyle="--", label="an actor")
    memory.set(xlabel="minutes", ylabel="RSS, MiB")
    memory.set_ylim(bottom=0)
    for axes in (rates, memory):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
