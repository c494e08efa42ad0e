"""Steps and seconds to a score, over seeds: whole runs of `seedrl run`, learner and actor on this machine.

A task is an environment of `NEUTRAL`, trained with no setting but its id, or a preset of conf/experiment or conf/env
with a score to stop at. Further settings may follow: "memory model.lstm=0". "A then B" is learned one after the other,
B from what A learned; what A took counts. Tasks that `out` has curves of and that are not asked for are kept. Runs that
take hours are kept in `runs`, where an interrupted measurement resumes. Figures are interquartile means over seeds with
bootstrap 95 % intervals, see seedrl/monitoring/statistics.py.
"""

import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bench.document import read
from bench.harness import Report
from seedrl.commandline.settings import conf_directory
from seedrl.config import BenchConfig
from seedrl.errors import ConfigError
from seedrl.monitoring.statistics import bootstrap, iqm

# What the shipped settings have to reach, and within how many steps; stated by issue 16 from what PPO libraries reach.
NEUTRAL = {
    "CartPole-v1": (475, 150_000),
    "Acrobot-v1": (-100, 300_000),
    "LunarLander-v3": (200, 1_000_000),
    "Pendulum-v1": (-200, 300_000),
    "InvertedPendulum-v4": (950, 150_000),
    "Hopper-v4": (2000, 1_000_000),
    "HalfCheetah-v4": (1400, 1_000_000),
    "Walker2d-v4": (2000, 1_000_000),
}

Runner = Callable[[Sequence[str], Path], None]  # settings of `seedrl run`, its run directory


@dataclass(frozen=True, slots=True)
class Curve:
    """One run: the mean return of the last 100 episodes as steps and seconds went by, and what it took in all."""

    task: str
    seed: int
    target: float
    score: float | None
    solved: bool
    cpu_seconds: float | None  # None if part of the run was made by an earlier measurement
    env_steps: list[int]
    seconds: list[float]
    returns: list[float]

    def after(self, earlier: "Curve") -> "Curve":
        """Return this outcome with the cost of an earlier run added."""
        both = (self.cpu_seconds, earlier.cpu_seconds)
        return replace(
            self,
            cpu_seconds=None if both[0] is None or both[1] is None else both[0] + both[1],
            env_steps=[steps + earlier.env_steps[-1] for steps in self.env_steps],
            seconds=[seconds + earlier.seconds[-1] for seconds in self.seconds],
        )


def train(settings: Sequence[str], run_dir: Path) -> None:
    command = [sys.executable, "-m", "seedrl", "run", f"run_dir={run_dir}", "display=none", *settings]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"seedrl run {' '.join(settings)} ended with code {done.returncode}: {done.stderr.strip()}")


def run(config: BenchConfig, runner: Runner = train) -> Report:
    report = Report("learning")
    kept = [curve for curve in known(config.out) if curve.task not in config.tasks]
    with _directory(config.runs) as directory:
        curves = [
            _run_one(task, seed, runner, directory) for seed in range(1, config.seeds + 1) for task in config.tasks
        ]
    report.detail["curves"] = [asdict(curve) for curve in kept + curves]
    if kept:
        report.note(f"measured earlier, at another commit: {', '.join(dict.fromkeys(curve.task for curve in kept))}")
    for task in dict.fromkeys([curve.task for curve in kept] + config.tasks):
        runs = [curve for curve in kept + curves if curve.task == task]
        report.add(_row(task, runs))
        if unsolved := [curve.seed for curve in runs if not curve.solved]:
            report.note(
                f"{task}: seeds {unsolved} did not reach {runs[0].target:g}; all they took counts: at least so much"
            )
    return report


def known(out: str) -> list[Curve]:
    """Return what an earlier measurement left in that file."""
    if not out or not Path(out).exists():
        return []
    stages = [stage for stage in read(Path(out)).stages if stage["stage"] == "learning"]
    return [Curve(**curve) for stage in stages for curve in stage["detail"]["curves"]]


@contextmanager
def _directory(named: str) -> Iterator[Path]:
    """Yield the directory that holds the runs: the named one, which is kept, or a temporary one."""
    if named:
        yield Path(named)
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        yield Path(directory)


def _run_one(task: str, seed: int, runner: Runner, directory: Path) -> Curve:
    curve: Curve | None = None
    run_dir = directory / re.sub(r"[^\w.=,-]+", "_", task) / str(seed)
    for part in task.split(" then "):
        start = [f"init_from={run_dir}"] if curve else []
        run_dir = run_dir.with_name(f"{run_dir.name}_then") if curve else run_dir
        newest = _curve_of([*settings_of(part), f"seed={seed}", *start], task, seed, runner, run_dir)
        curve = newest.after(curve) if curve else newest
    assert curve is not None  # a split has at least one part
    print(
        f"  {task} seed {seed}: {curve.score} after {curve.env_steps[-1]:,} steps, {curve.seconds[-1]:.1f} s",
        flush=True,
    )
    return curve


def _curve_of(settings: Sequence[str], task: str, seed: int, runner: Runner, run_dir: Path) -> Curve:
    """Return the curve of a run, which is started, resumed or, if it is done, only read."""
    is_new = not run_dir.exists()
    before = _cpu_of_children()
    if not _is_done(run_dir):
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        runner(settings, run_dir)
    return read_curve(task, seed, run_dir, _cpu_of_children() - before if is_new else None)


def _is_done(run_dir: Path) -> bool:
    summary = run_dir / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["status"] == "done"


def settings_of(task: str) -> list[str]:
    preset, *others = task.split()
    if preset in NEUTRAL:
        score, steps = NEUTRAL[preset]
        return [f"env.id={preset}", f"stop.return_mean_100={score}", f"stop.env_steps={steps}", *others]
    is_experiment = (conf_directory() / "experiment" / f"{preset}.yaml").exists()
    return [f"{'experiment' if is_experiment else 'env'}={preset}", *others]


def read_curve(task: str, seed: int, run_dir: Path, cpu_seconds: float | None) -> Curve:
    """Return the curve of a run directory. The last point is the summary's."""
    stop = yaml.safe_load((run_dir / "config.yaml").read_text())["stop"]
    target = stop["return_mean_100"]
    if target is None:
        raise ConfigError(f"tasks={task} has no score to reach; give presets that set stop.return_mean_100")
    summary = json.loads((run_dir / "summary.json").read_text())
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    points = [row for row in [*rows, summary] if row["return_mean_100"] is not None]
    return Curve(
        task,
        seed,
        target,
        summary["return_mean_100"],
        summary["env_steps"] < stop["env_steps"],  # by the end of the run the mean may have moved off the target again
        cpu_seconds,
        env_steps=[row["env_steps"] for row in points],
        seconds=[row["seconds"] for row in points],
        returns=[row["return_mean_100"] for row in points],
    )


def _row(task: str, runs: Sequence[Curve]) -> dict[str, Any]:
    measures = {
        "steps": [run.env_steps[-1] for run in runs],
        "seconds": [run.seconds[-1] for run in runs],
        "CPU-seconds": [run.cpu_seconds for run in runs if run.cpu_seconds is not None],
    }
    row: dict[str, Any] = {
        "task": task,
        "wanted": runs[0].target,
        "reached": ", ".join(_short(run.score) if run.score is not None else "–" for run in runs),
        "solved": f"{sum(r.solved for r in runs)}/{len(runs)}",
    }
    for name, values in measures.items():
        if not values:
            continue
        low, high = bootstrap(np.array(values, float))
        row[name] = float(iqm(np.array(values, float)))
        row[f"{name} 95 %"] = f"{_short(low)}…{_short(high)}"
    return row


def _cpu_of_children() -> float:
    """Return the CPU time of all children that have ended, their own children included."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
