"""Simulates more actors, ranks and faster links from measured costs, and checks how far that is from runs.

Costs of the server thread are those of bench/results/results.json (stages wire and service); those of networks are
measured here, alone. The simulation itself is bench/cluster.py. It is checked against whole runs whose environments
sleep, so that the cores of one machine do not count; what is beyond that is predicted, not measured.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.cluster import AT_ONCE, Costs, Link, Outcome, Shape, all_reduce_seconds, simulate
from bench.document import Document, read
from bench.harness import Ratio, Report, run_for
from bench.inference import ServingPath
from bench.learner import FullStore
from bench.service import BATCHED, FORWARD, FRAME, ROWS
from bench.whole_run import MEANS, Watched, watch
from seedrl.config import BenchConfig
from seedrl.errors import ConfigError

RESULTS = Path(__file__).with_name("results") / "results.json"
STEP = 0.02  # seconds that a group's step takes in the runs it is checked against
MODEL = "bench.rig:PacedModel"
SLEEPS = {  # seconds of the network in those runs, by what they make the limit
    "environments": {"acting": 0.0, "training": 0.0},
    "inference": {"acting": 0.03, "training": 0.0},
    "training": {"acting": 0.0, "training": 0.2},
}
GRADIENTS = 4 * 1_690_000  # bytes: the Nature CNN
UNROLL = Shape().unroll_length
MESSAGES = 100_000  # are enough for a percentile

# Assumed, as no accelerator could be measured: a forward of a millisecond and two microseconds more for each row, and
# 100,000 steps trained per second.
ASSUMED_FORWARD, ASSUMED_FORWARD_ROW, ASSUMED_STEP = 1e-3, 2e-6, 1e-5
ASSUMED_LATENCY = 50e-6  # seconds, one way within a rack
GIGABIT = 1e9 / 8


def run(config: BenchConfig) -> Report:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    report = Report("simulation")
    document = read(RESULTS)
    serving = serving_costs(document)
    report.note(f"{', '.join(f'{name} {1e6 * getattr(serving, name):.1f} µs' for name in ('message', 'row', 'batch'))}")
    check_service(report, document, serving)
    check_pong(report, document, serving)
    check_runs(report, serving, config)
    predict(report, document, serving)
    return report


# Costs.


def serving_costs(document: Document) -> Costs:
    """Return the costs of the server thread, in seconds of wall time without pauses.

    Those of messages and rows are from `wire`, those of batches from what `service` takes more.
    """
    wire = [row for row in _table(document, "wire") if row["side"] == "stream" and _is_plain(row)]
    rows = np.array([row["rows"] for row in wire])
    row, message = np.polyfit(rows, rows / np.array([each["rows per second"] for each in wire]), 1)
    per_batch = [
        measured - messages * (message + ROWS * row) for messages, measured in _saturated(document)
    ]  # of one, two and four messages
    return Costs(step=0.0, message=float(message), row=float(row), batch=max(0.0, float(np.median(per_batch))))


def _saturated(document: Document) -> Iterator[tuple[int, float]]:
    """(messages in a batch, seconds that a batch takes) where the server thread had no pause."""
    messages = {
        ("service, 2 in flight", 2 * ROWS): 1,
        ("service, batches of 128", 4 * ROWS): 2,
        ("service", 8 * ROWS): 4,
    }
    for row in _table(document, "service"):
        if (count := messages.get((row["side"], row.get("envs", 0)))) and row["actors"] == 1:
            yield count, count * ROWS / row["rows per second"]


def _is_plain(row: dict[str, Any]) -> bool:
    plain = {"bytes per row": FRAME, "in flight": 2, "actors": 1, "transport": "unix"}
    return all(row[name] == value for name, value in plain.items())


def network_costs(serving: Costs, rows: int, unrolls: int, seconds: float) -> Costs:
    """With what the network of the checks takes alone, for forwards of so many rows and updates of so many unrolls."""
    few, many = (count / run_for(seconds, ServingPath(count, MODEL).serve).rate for count in (rows, 4 * rows))
    per_row = max(0.0, (many - few) / (3 * rows))
    update = unrolls * UNROLL / run_for(seconds, FullStore(unrolls, MODEL).update).rate
    return dataclasses.replace(serving, batch=few - rows * per_row, batch_row=per_row, update=update)


def slept(wanted: float, seconds: float) -> float:
    """Return how long a sleep takes on this machine, which may be busy."""

    def sleep() -> int:
        time.sleep(wanted)
        return 1

    return 1 / run_for(seconds, sleep).rate if wanted else 0.0


def beside_serving(document: Document) -> float:
    """Seconds for a step trained with the Nature CNN in a whole run, where the learner shares cores and interpreter."""
    runs = [row for row in _table(document, "end_to_end") if row["part"] == "pong"]
    return float(np.median([(1 - row["learner wait fraction"]) / row["steps per second"] for row in runs]))


def env_seconds(document: Document) -> float:
    """Return the seconds of one step of Pong on one core."""
    rows = [row for row in _table(document, "pool") if row["env"] == "Pong-v5" and row["threads"] == 1]
    return float(1 / np.median([row["steps per CPU-second"] for row in rows]))


def _table(document: Document, stage: str) -> list[dict[str, Any]]:
    for each in document.stages:
        if each["stage"] == stage:
            return list(each["table"])
    raise ConfigError(f"{RESULTS} has no stage {stage}, which the simulation takes costs from; make bench writes it")


# Checks.


def check_service(report: Report, document: Document, serving: Costs) -> None:
    """Saturated, and at half load with a model of 5 ms, as stage `service` has measured it."""
    endless = Shape(batch_size=10**9, capacity=10**9, max_rows=BATCHED)
    ratios = []
    for messages, seconds in _saturated(document):
        shape = dataclasses.replace(endless, envs=2 * messages * ROWS, groups=2 * messages, max_rows=messages * ROWS)
        simulated = simulate(shape, serving).rows_per_second
        ratios.append(simulated * seconds / messages / ROWS)
        _compare(report, f"service, {messages} messages a batch", "rows/s", simulated, messages * ROWS / seconds)
    shape = dataclasses.replace(endless, actors=2, envs=ROWS, groups=1)  # groups that do not wait for each other
    costs = dataclasses.replace(serving, step=3 * FORWARD, batch=serving.batch + FORWARD)
    half = simulate(shape, costs, seconds=20.0)
    measured = next(row for row in _table(document, "service") if row["side"] == "half load")
    for name, seconds in (("p50 ms", half.latency_p50), ("p99 ms", half.latency_p99)):
        _compare(report, "service, half load", name, 1e3 * seconds, measured[name])
        ratios.append(1e3 * seconds / measured[name])
    report.add_ratio(Ratio("simulated_over_service", ratios))


def check_runs(report: Report, serving: Costs, config: BenchConfig) -> None:
    """Whole runs of 1, 2 and 4 actors with a network that sleeps, too, so that each part is the limit in turn."""
    rates, trips = [], []
    shape = Shape(envs=32, groups=2, batch_size=16)
    alone = network_costs(serving, shape.rows, shape.batch_size, config.seconds)
    for limit, sleeps in SLEEPS.items():
        costs = dataclasses.replace(
            alone,
            step=slept(STEP, config.seconds),
            batch=alone.batch + slept(sleeps["acting"], config.seconds),
            update=alone.update + slept(sleeps["training"], config.seconds),
        )
        for actors in (1, 2, 4):
            shape = dataclasses.replace(shape, actors=actors)
            simulated = simulate(shape, costs, warm_up=20.0, seconds=60.0)
            measured = measure_run(shape, sleeps, max(8.0, 5 * config.seconds))
            rates.append(_check(report, f"{limit}, {actors} actors", simulated, measured))
            trips.append(simulated.latency_mean / measured.metrics["round_trip_seconds"])
    report.add_ratio(Ratio("simulated_over_measured_rate", rates))
    # Cases are no repeats: a median over them would hide the one that is wrong.
    report.add_ratio(Ratio("simulated_rate_off_by", [max(max(ratio, 1 / ratio) for ratio in rates)], bound=1.25))
    report.add_ratio(Ratio("simulated_over_measured_round_trip", trips))


def measure_run(shape: Shape, sleeps: dict[str, float], seconds: float) -> Watched:
    settings = [
        *("env=mock", f"+env.options.step_seconds={STEP}", "serving.shared_memory=false"),
        *(f"model.name={MODEL}", *(f"+model.options.{name}={value}" for name, value in sleeps.items())),
        *(f"actors.count={shape.actors}", f"actors.envs={shape.envs}", f"actors.groups={shape.groups}"),
        f"algorithm.batch_size={shape.batch_size}",
    ]
    return watch(settings, seconds, [*MEANS, "round_trip_seconds"])


def check_pong(report: Report, document: Document, serving: Costs) -> None:
    """The preset on this machine's cores: its rate went into the costs, its lag and its full store did not."""
    simulated = settled(*pong_on_one_host(document, serving, actors=1), AT_ONCE)
    runs = [row for row in _table(document, "end_to_end") if row["part"] == "pong"]
    measured = {name: float(np.median([row[name] for row in runs])) for name in ("policy lag", "backpressure fraction")}
    _compare(report, "pong, 1 actors", "policy lag", simulated.policy_lag, measured["policy lag"])
    _compare(report, "pong, 1 actors", "store full", simulated.hold, measured["backpressure fraction"])


def _check(report: Report, what: str, simulated: Outcome, measured: Watched) -> float:
    """Notes all figures; returns the ratio of the rates."""
    metrics = measured.metrics
    pairs: Sequence[tuple[str, float, float]] = (
        ("steps/s", simulated.rows_per_second, measured.turn.rate),
        ("round trip ms", 1e3 * simulated.latency_mean, 1e3 * metrics["round_trip_seconds"]),
        ("policy lag", simulated.policy_lag, metrics["policy_lag"]),
        ("learner waits", simulated.learner_wait, metrics["learner_wait_fraction"]),
        ("store full", simulated.hold, metrics["backpressure_fraction"]),
    )
    for name, ours, theirs in pairs:
        _compare(report, what, name, ours, theirs)
    return simulated.rows_per_second / measured.turn.rate


def _compare(report: Report, what: str, name: str, simulated: float, measured: float) -> None:
    report.add({"check": what, "of": name, "simulated": simulated, "measured": float(measured)})


# Predictions.


def predict(report: Report, document: Document, serving: Costs) -> None:
    """Pong, an actor on each core. One host trains on its CPU with the preset; all others have the accelerator."""
    for actors in (1, 2, 4):
        _predict(report, "one host, CPU", *pong_on_one_host(document, serving, actors), AT_ONCE)
    fast = dataclasses.replace(
        serving,
        step=ROWS * env_seconds(document),
        batch=serving.batch + ASSUMED_FORWARD,
        batch_row=ASSUMED_FORWARD_ROW,
    )
    scale = _scaled(fast, Shape(envs=2 * ROWS, groups=2, batch_size=256))
    for actors in (1, 4, 8, 16, 32, 64):
        _predict(report, "one rack", *scale(actors, 1, 10))
    for gigabits in (1, 10, 25, 100):
        _predict(report, "one rack by link", *scale(32, 1, gigabits))
    for ranks in (1, 4, 16, 32, 64):
        _predict(report, "a thousand actors", *scale(1000, ranks, 25))


def pong_on_one_host(document: Document, serving: Costs, actors: int) -> tuple[Shape, Costs]:
    shape = Shape(actors=actors, envs=32, groups=2, batch_size=8)
    training = shape.batch_size * UNROLL * beside_serving(document)
    step = shape.rows * env_seconds(document)
    return shape, dataclasses.replace(serving, step=step, update=training, **_cpu_forward(document))


def _cpu_forward(document: Document) -> dict[str, float]:
    """Return the cost of a forward of the Nature CNN, all of the serving path included."""
    rows = [row for row in _table(document, "inference") if row["side"] == "serving"]
    counts = np.array([row["rows"] for row in rows])
    per_row, batch = np.polyfit(counts, counts / np.array([row["rows per second"] for row in rows]), 1)
    return {"batch": float(max(0.0, batch)), "batch_row": float(per_row)}


def _scaled(costs: Costs, shape: Shape) -> Callable[[int, int, float], tuple[Shape, Costs, Link]]:
    """Return a function of actors, ranks and Gbit/s. The store has room for an unroll of each slot, as is advised."""

    def scaled(actors: int, ranks: int, gigabits: float) -> tuple[Shape, Costs, Link]:
        slots = -(-actors // ranks) * shape.envs
        capacity = max(2 * shape.batch_size, slots)
        link = Link(ASSUMED_LATENCY, gigabits * GIGABIT)
        update = shape.batch_size * UNROLL * ASSUMED_STEP
        return (
            dataclasses.replace(shape, actors=actors, ranks=ranks, capacity=capacity),
            dataclasses.replace(costs, update=update, publish=all_reduce_seconds(ranks, GRADIENTS, link)),
            link,
        )

    return scaled


def _predict(report: Report, size: str, shape: Shape, costs: Costs, link: Link) -> None:
    outcome = settled(shape, costs, link)
    report.add(
        {
            "size": size,
            "actors": shape.actors,
            "ranks": shape.ranks,
            "Gbit/s": 0 if link is AT_ONCE else round(link.bandwidth / GIGABIT),
            "batch_size": shape.batch_size,
            "steps/s": outcome.rows_per_second,
            "p50 ms": 1e3 * outcome.latency_p50,
            "p99 ms": 1e3 * outcome.latency_p99,
            "policy lag": outcome.policy_lag,
            "learner waits": outcome.learner_wait,
            "server busy": outcome.server_busy,
            "limit": _limit(shape, link, outcome),
        }
    )


def settled(shape: Shape, costs: Costs, link: Link) -> Outcome:
    """After every slot has made four unrolls, over twenty more, or fewer where there are many."""
    pilot = simulate(shape, costs, link, warm_up=1.0, seconds=1.0)
    unroll = shape.actors * shape.envs * UNROLL / pilot.rows_per_second  # seconds
    enough = MESSAGES * shape.rows / pilot.rows_per_second
    return simulate(shape, costs, link, warm_up=4 * unroll, seconds=max(2 * unroll, min(20 * unroll, enough)))


def _limit(shape: Shape, link: Link, outcome: Outcome) -> str:
    """Return the part that has no capacity left; by default the environments."""
    used = outcome.rows_per_second / shape.ranks * shape.row_bytes / link.bandwidth
    shares = {"learner": 1 - outcome.learner_wait, "server thread": outcome.server_busy, "link": used}
    name = max(shares, key=lambda each: shares[each])
    return name if shares[name] > 0.95 else "environments"
