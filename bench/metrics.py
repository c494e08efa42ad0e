"""Measures the cost of counting and sampling: stopwatches and histograms of a training, a look at counters, a scrape.

Plain additions to a counter are left out: some twenty for a request and a batch, at 30 to 50 ns each.
"""

import json
import tempfile
import threading
import timeit
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bench.harness import Ratio, Report
from bench.rig import private_address, vtrace_config
from bench.whole_run import watch
from envs_server.actor import Actor
from seedrl.config import BenchConfig, Display
from seedrl.metrics import MANY, SECONDS, Histogram, LearnerState, LearningMetrics, ServingMetrics, Stopwatch
from seedrl.monitoring.diagnosis import diagnose
from seedrl.monitoring.exposition import Exposition
from seedrl.monitoring.sampler import Sampler
from seedrl.roles.learner import LOOK_SECONDS, LearnerProcess
from seedrl.serving.seats import planned_seats
from seedrl.serving.sessions import SessionTable
from seedrl.wire.messages import Hello

STEPS = 100_000  # in which calls are counted
PROMETHEUS = Path(__file__).parents[1] / "conf/observability/prometheus.yml"
CALLS: dict[str, tuple[type, str]] = {
    "Stopwatch()": (Stopwatch, "__init__"),
    "lap": (Stopwatch, "lap"),
    "observe": (Histogram, "observe"),
    "observe_all": (Histogram, "observe_all"),  # few values at once are observed one by one
}


def run(config: BenchConfig) -> Report:
    report = Report("metrics")
    calls = calls_per_step()
    costs = [costs_of_calls() for _ in range(config.repeats)]
    for name in CALLS:
        cost = 1e6 * float(np.median([each[name] for each in costs]))
        report.add({"call": name, "per 1000 steps": 1000 * calls[name], "µs each": cost})
    per_step = [1e6 * sum(calls[name] * cost[name] for name in CALLS) for cost in costs]
    step = watch(["env=cartpole"], 5 * config.seconds).turn.cpu_us
    report.add({"call": "all of them, µs per step", "per 1000 steps": 0.0, "µs each": float(np.median(per_step))})
    report.note(f"a step of CartPole, the cheapest training here, takes {step:.1f} µs of CPU time, all processes")
    report.add_ratio(Ratio("metrics_over_step", [each / step for each in per_step], bound=0.01))
    seconds = yaml.safe_load(PROMETHEUS.read_text())["global"]["scrape_interval"].removesuffix("s")
    serving, learning = ServingMetrics(), LearningMetrics()
    exposition = Exposition(serving, learning, LearnerState())
    report.note(f"{sum(not line.startswith(b'#') for line in exposition.text().splitlines())} series")
    add_share(report, config, "scrape_over_time", exposition.text, float(seconds))
    add_share(report, config, "look_over_time", one_look(serving, learning), LOOK_SECONDS)
    return report


def add_share(report: Report, config: BenchConfig, name: str, work: Callable[[], Any], every: float) -> None:
    """Time that something done every so many seconds takes, of all time."""
    turns = [each / 20 for each in timeit.repeat(work, number=20, repeat=config.repeats)]
    report.note(f"{name}: {1e3 * float(np.median(turns)):.2f} ms every {every:g} s")
    report.add_ratio(Ratio(name, [each / every for each in turns], bound=0.01))


def one_look(serving: ServingMetrics, learning: LearningMetrics) -> Callable[[], Any]:
    """Do what the main thread does twice a second, and record it now and then."""
    config = vtrace_config()
    sessions = SessionTable(config, lambda session: session, planned_seats(config))
    sessions.join(Hello("bench"))
    sampler = Sampler(config, serving, learning, sessions)
    before = sampler.totals()

    def look() -> str:
        row = sampler.row(before, sampler.totals())
        return json.dumps({**row, "bottleneck": diagnose(row, config).bottleneck})

    return look


def calls_per_step() -> dict[str, float]:
    """Return the calls per step of CartPole with its preset: learner and actor in this process."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, private_address() as address, _counted() as calls:
        config = vtrace_config()
        config.run_dir, config.listen = str(Path(directory, "run")), address
        config.display, config.metrics = Display.none, ""
        config.algorithm.batch_size = 32
        config.actors.envs = 128
        config.stop.env_steps = STEPS
        service = LearnerProcess(config)
        actor = Actor(address, name="bench", say=lambda text: None)
        thread = threading.Thread(target=actor.run, name="actor", daemon=True)
        thread.start()
        summary = service.run()
        thread.join(10)
    return {name: calls[name] / summary["env_steps"] for name in CALLS}


def costs_of_calls() -> dict[str, float]:
    """Seconds of one call."""
    spent = {"stage": 0.0}
    timer, histogram = Stopwatch(spent), Histogram(SECONDS)
    values = np.linspace(0.0, 1.0, 32 * 20)  # a train batch
    works: dict[str, Callable[[], Any]] = {
        "Stopwatch()": lambda: Stopwatch(spent),
        "lap": lambda: timer.lap("stage"),
        "observe": lambda: histogram.observe(0.003),
        "observe_all": lambda: histogram.observe_all(values),
    }
    return {name: min(timeit.repeat(work, number=2000, repeat=3)) / 2000 for name, work in works.items()}


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Counts every call of CALLS meanwhile, in all threads."""
    calls: Counter[str] = Counter()
    originals = {name: getattr(owner, method) for name, (owner, method) in CALLS.items()}

    def counting(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[name] += name != "observe_all" or arguments[1].size >= MANY
            return originals[name](*arguments)

        return call

    for name, (owner, method) in CALLS.items():
        setattr(owner, method, counting(name))
    try:
        yield calls
    finally:
        for name, (owner, method) in CALLS.items():
            setattr(owner, method, originals[name])
