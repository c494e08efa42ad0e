"""Our own side, measured as the peers are: `seedrl run` with the preset of the environment, nothing tuned for this.

`inference` is serving alone: actors in a process of their own with a pool that costs nothing, and the Nature CNN.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

from bench.peers.meter import Meter, arguments, end_descendants, finish
from bench.rig import ServingRig, private_address, vtrace_config
from seedrl.models.build import build_model


def main() -> None:
    asked = arguments()
    if asked.env == "inference":
        serve(asked)
    learned = learn(asked) if asked.target else {}
    train(asked, learned)


def train(asked: argparse.Namespace, learned: dict[str, float]) -> NoReturn:
    """Follows the measurements a run writes down every five seconds; the first row ends the warm-up."""
    run_dir = Path(tempfile.mkdtemp(), "run")
    run = start(asked, run_dir, "stop.return_mean_100=null", "stop.env_steps=1000000000")
    meter, seen, since = Meter(asked, warm_up=0.0), 0, time.monotonic()
    while run.poll() is None and time.monotonic() - since < asked.patience:
        rows = metrics_of(run_dir)
        if len(rows) > seen:
            seen, since = len(rows), time.monotonic()
            meter.update(rows[-1]["env_steps"])
        if "steps" in meter.result:
            finish(meter.result | learned)
        time.sleep(0.02)
    sys.exit("the run ended or went silent before it was measured")


def learn(asked: argparse.Namespace) -> dict[str, float]:
    """The preset's own run, schedules included, which stops at the target: when that was, if it was."""
    run_dir = Path(tempfile.mkdtemp(), "run")
    run = start(asked, run_dir, f"stop.return_mean_100={asked.target:g}")
    try:
        run.wait(asked.patience)
    except subprocess.TimeoutExpired:
        end_descendants(os.getpid())
        run.wait()
        return {}
    last = metrics_of(run_dir)[-1]
    if run.returncode != 0 or (last["return_mean_100"] or 0.0) < asked.target:
        return {}
    return {"seconds_to_target": last["seconds"], "steps_to_target": last["env_steps"]}


def start(asked: argparse.Namespace, run_dir: Path, *overrides: str) -> subprocess.Popen[bytes]:
    settings = [f"env={asked.env}", f"seed={asked.seed}", f"run_dir={run_dir}"]
    command = [sys.executable, "-m", "seedrl", "run", *settings, "display=none", *overrides]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """The rows that are complete so far."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def serve(asked: argparse.Namespace) -> NoReturn:
    """Serving without training, 64 environments in two groups."""
    config = vtrace_config()
    config.env.id, config.env.options, config.env.frame_stack = "mock", {"shape": [1, 84, 84]}, 4
    config.actors.envs = config.serving.max_slots = 64
    with private_address() as address:
        config.listen = address
        with ServingRig(config, lambda spec: build_model(config.model, spec, config.seed)) as rig:
            subprocess.Popen([sys.executable, "-m", "envs_server", f"learner={address}"], stdout=subprocess.DEVNULL)
            meter: Meter | None = None
            while not (meter and meter.update(rig.metrics.rows)):
                meter = meter or (Meter(asked, warm_up=2.0) if rig.metrics.rows else None)
                time.sleep(0.05)
            meter.finish()


if __name__ == "__main__":
    main()
