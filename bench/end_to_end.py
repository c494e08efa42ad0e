"""Real training against the overhead-free limit: what the cores gave if only env, inference and training cost time.

    limit = cores ÷ Σ (core-seconds per step of env, inference, training, each measured alone in this very run)
    efficiency = measured ÷ limit

Then the infrastructure race, where simulator and network cost next to nothing and everything else is what is left.
"""

import os
import statistics
from collections.abc import Callable
from functools import partial

import torch

from bench.harness import Ratio, Report, Turn, interleave, run_for
from bench.inference import ServingPath
from bench.learner import FullStore
from bench.pool import Stepping
from bench.whole_run import Watched, watch
from seedrl.config import BenchConfig

ENVS, ROWS, UNROLLS = 32, 16, 8  # of conf/env/pong.yaml: environments, rows of a request, unrolls of a train batch
CORES = os.cpu_count() or 1


def run(config: BenchConfig) -> Report:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    report = Report("end_to_end")
    measure_pong(report, config)
    measure_race(report, config)
    return report


def measure_pong(report: Report, config: BenchConfig) -> None:
    seconds = max(10.0, 5 * config.seconds)
    alone: dict[str, Callable[[], Turn]] = {
        "env": partial(run_for, config.seconds, Stepping("Pong-v5", {"stack_num": 1}, ENVS, CORES, groups=2).step),
        "inference": partial(run_for, config.seconds, ServingPath(ROWS).bare),
        "training": partial(run_for, config.seconds, FullStore(UNROLLS).bare),
    }
    parts: list[dict[str, Turn]] = []
    runs: list[Watched] = []

    def measure_parts() -> None:
        parts.append({name: part() for name, part in alone.items()})

    interleave(
        {"alone": measure_parts, "run": lambda: runs.append(watch(["env=pong"], seconds))}, max(2, config.repeats // 2)
    )
    limits = [CORES / sum(turn.cpu / turn.count for turn in each.values()) for each in parts]
    for name in alone:
        report.add({"part": name, "ms alone": statistics.median(1e-3 * each[name].cpu_us for each in parts)})
    report.add({"part": "actor process", "ms in the run": _ms(runs, lambda run: run.actor_cpu)})
    report.add({"part": "learner process", "ms in the run": _ms(runs, lambda run: run.learner_cpu)})
    for limit, each in zip(limits, runs, strict=True):
        report.add(
            {
                "part": "pong",
                "steps per second": each.turn.rate,
                "limit": limit,
                "steps per CPU-second": each.turn.per_cpu,
                "cores busy": each.turn.cpu / each.turn.wall,
                "bytes per step": 84 * 84 + 9,
                **{name.replace("_", " "): value for name, value in each.metrics.items()},
            }
        )
    rates = [each.turn.rate for each in runs]
    report.add_ratio(
        Ratio("efficiency", [rate / limit for rate, limit in zip(rates, limits, strict=True)], 0.85, at_most=False)
    )
    waits = [each.metrics["learner_wait_fraction"] for each in runs]
    report.add_ratio(Ratio("learner_wait_fraction", waits, bound=0.05))


def measure_race(report: Report, config: BenchConfig) -> None:
    """A mock environment with Atari's frames, then Pong itself, both with a network that is next to free."""
    seconds, repeats = max(5.0, 2 * config.seconds), max(2, config.repeats // 2)
    pool = Stepping("Pong-v5", {"stack_num": 1}, ENVS, CORES, groups=2)
    sides: dict[str, Callable[[], Watched | Turn]] = {
        "mock": lambda: watch(["env=mock", "model=tiny"], seconds),
        "pong": lambda: watch(["env=pong", "model=tiny"], seconds),
        "pool": lambda: run_for(config.seconds, pool.step),
    }
    turns = interleave(sides, repeats)
    mock = [each for each in turns["mock"] if isinstance(each, Watched)]
    pong = [each for each in turns["pong"] if isinstance(each, Watched)]
    pools = [each for each in turns["pool"] if isinstance(each, Turn)]
    for name, watched in (("mock, tiny net", mock), ("pong, tiny net", pong)):
        rate = statistics.median(each.turn.rate for each in watched)
        per_cpu = statistics.median(each.turn.per_cpu for each in watched)
        report.add({"part": name, "steps per second": rate, "steps per CPU-second": per_cpu})
    goal = 25_000  # steps per CPU-second; moolib has 12,400 on such a machine
    report.add_ratio(Ratio("mock_over_25000_per_cpu", [each.turn.per_cpu / goal for each in mock], 1.0, at_most=False))
    report.add_ratio(
        Ratio("pong_tiny_over_pool", [_share(run, alone) for run, alone in zip(pong, pools, strict=True)], 0.85, False)
    )


def _share(run: Watched, alone: Turn) -> float:
    """Return the share of what envpool alone would give on the cores that the learner process leaves."""
    cores_left = CORES - run.learner_cpu / run.turn.wall
    return run.turn.rate / (alone.per_cpu * cores_left)


def _ms(runs: list[Watched], cpu: Callable[[Watched], float]) -> float:
    return statistics.median(1e3 * cpu(run) / run.turn.count for run in runs)
