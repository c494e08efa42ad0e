"""summary.json: a run in a few numbers, at its end. Knows nothing of how they are measured."""

import contextlib
import platform
import subprocess
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from seedrl.config import LearnerConfig
from seedrl.metrics import LearningMetrics, ServingMetrics
from seedrl.monitoring.reporting import trouble
from seedrl.run.stopping import Stop
from seedrl.run.totals import Counts, restore_counters
from seedrl.status import Learning
from seedrl.version import __version__


def summarize(config: LearnerConfig, stop: Stop, counts: Counts, seconds: float, verdict: Learning) -> dict[str, Any]:
    """Return the summary. `seconds` includes earlier processes; `counts` are those of all ranks, or of one."""
    serving, learning = ServingMetrics(), LearningMetrics()
    restore_counters(counts, serving, learning)
    return {
        "status": stop.status,
        "reason": stop.reason,
        "env": config.env.id,
        "env_steps": serving.env_steps,
        "frames": serving.env_steps * config.env.frame_skip,
        "updates": learning.updates,
        "episodes": serving.episodes,
        "seconds": round(seconds, 3),
        "steps_per_second": round(serving.env_steps / seconds, 1) if seconds else 0.0,
        "return_mean_100": serving.return_mean_100,
        "eval_steps": serving.eval_steps,
        "eval_episodes": serving.eval_episodes,
        "eval_return_mean_100": serving.eval_return_mean_100,
        **({"games": dict(serving.games)} if sum(serving.games.values()) else {}),
        "learning": asdict(verdict),
        "policy_lag_mean": round(learning.policy_lag.mean, 3),
        "learner_wait_fraction": round(learning.wait_fraction, 4),
        "inference_batch_mean": round(serving.batch_mean, 2),
        "trouble": trouble(serving, learning),
        "seconds_by_stage": {
            "server": _rounded(serving.serving_seconds),
            "learner": _rounded(learning.learner_seconds),
        },
        "seed": config.seed,
        "ranks": config.ranks.count,
        "made_with": made_with(),
    }


def made_with() -> dict[str, str]:
    """Return the versions, and the commit if this is a checkout."""
    return {
        "seedrl": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy")},
        "machine": f"{platform.system()} {platform.machine()}",
    }


def _commit() -> str:
    checkout = Path(__file__).parents[1]
    if not (checkout / ".git").exists():  # installed: a repository around it is not that of seedrl
        return ""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, cwd=checkout, capture_output=True, text=True, check=True, timeout=2
        ).stdout.strip()
    return ""


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {stage: round(value, 3) for stage, value in seconds.items()}
