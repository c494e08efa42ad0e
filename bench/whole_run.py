"""A real `seedrl run`, watched from outside: what it says in metrics.jsonl, and the CPU time of its processes."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import Turn, children, cpu_seconds
from bench.peers.meter import family

WARM_UP = 6.0  # seconds of training
PATIENCE = 120.0  # for the next row of metrics
MEANS = ("learner_wait_fraction", "inference_batch", "policy_lag", "backpressure_fraction")


@dataclass(frozen=True, slots=True)
class Watched:
    """A stretch of a run. CPU is in seconds."""

    turn: Turn  # steps, by the whole process tree
    learner_cpu: float
    actor_cpu: float
    metrics: dict[str, float]  # means over the stretch


def watch(settings: Sequence[str], seconds: float, means: Sequence[str] = MEANS) -> Watched:
    """Starts a run that does not end by itself, and looks at it for a while once it is warm."""
    with tempfile.TemporaryDirectory(prefix="bench-run-") as directory:
        run_dir = Path(directory, "run")
        command = [sys.executable, "-m", "seedrl", "run", *settings, f"run_dir={run_dir}", "display=none"]
        endless = ["stop.return_mean_100=null", "stop.env_steps=1000000000"]
        with children([[*command, *endless]]) as (run,):
            first = _row_after(run, run_dir, WARM_UP)
            parts = _parts(run.pid)
            cpu_before = {name: cpu_seconds(pids) for name, pids in parts.items()}
            last = _row_after(run, run_dir, first["seconds"] + seconds)
            cpu = {name: cpu_seconds(pids) - cpu_before[name] for name, pids in parts.items()}
            rows = [row for row in _rows(run_dir) if first["time"] < row["time"] <= last["time"]]
    steps, wall = last["env_steps"] - first["env_steps"], last["time"] - first["time"]
    metrics = {name: sum(row[name] for row in rows) / len(rows) for name in means}
    return Watched(Turn(steps, wall, sum(cpu.values())), cpu["learner"], cpu["actor"], metrics)


def _parts(root: int) -> dict[str, list[int]]:
    parts: dict[str, list[int]] = {"learner": [], "actor": []}
    for pid in family(root):
        is_actor = "envs_server" in Path(f"/proc/{pid}/cmdline").read_text()
        parts["actor" if is_actor else "learner"].append(pid)
    return parts


def _row_after(run: "subprocess.Popen[str]", run_dir: Path, seconds: float) -> dict[str, Any]:
    """The first row of metrics that is written after so many seconds of training."""
    give_up = time.monotonic() + PATIENCE + seconds
    while time.monotonic() < give_up and run.poll() is None:
        rows = _rows(run_dir)
        if rows and rows[-1]["seconds"] >= seconds:
            return rows[-1]
        time.sleep(0.01)
    raise RuntimeError(f"the run ended or went silent: {run.args!r}")


def _rows(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
