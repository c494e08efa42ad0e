"""The last lines of a run: its outcome, and the commands that a user may want next, by the reason of the end.

Every command can be pasted as it is. Knows nothing of how the numbers are measured.
"""

import importlib.util
import shlex
from collections.abc import Iterator
from typing import Any

from seedrl.config import LearnerConfig
from seedrl.monitoring.units import duration
from seedrl.plugins import is_own
from seedrl.run.directory import RunDirectory

WIDTH = 10  # characters of the first column

Json = dict[str, Any]


def closing_words(run: RunDirectory, config: LearnerConfig, summary: Json) -> str:
    """Return the closing lines of a run that ended cleanly."""
    if not summary["updates"]:
        return "\n".join([f"{summary['reason']}, before anything was trained.", *next_lines(run, config, summary)])
    score, episodes = summary["return_mean_100"], min(summary["episodes"], 100)
    counted = "1 episode" if episodes == 1 else f"the last {episodes} episodes"
    shown_score = "no episode finished" if score is None else f"{score:.2f} (mean return of {counted})"
    evaluated = summary["eval_return_mean_100"]
    lines = [
        f"{summary['reason']}.",
        _line("score", shown_score),
        *([] if evaluated is None else [_line("evaluation", f"{evaluated:.2f} (the same, acting greedily)")]),
        *learning_words(summary["learning"]),
        _line(
            "steps",
            f"{summary['env_steps']:,} in {duration(summary['seconds'])}, {summary['steps_per_second']:,.0f} steps/s",
        ),
        _line(
            "updates",
            f"{summary['updates']:,}, policy lag {summary['policy_lag_mean']:.1f}, learner waited "
            f"{summary['learner_wait_fraction']:.0%}, {summary['inference_batch_mean']:.0f} rows per batch",
        ),
        *timing_tree(summary["seconds_by_stage"]),
        _line("saved in", str(run.path)),
        *next_lines(run, config, summary),
    ]
    return "\n".join(lines)


def failed_words(run: RunDirectory, config: LearnerConfig) -> str:
    """Return what a user can do about a run that failed."""
    return "\n".join(next_lines(run, config, {"status": "failed"}))


def next_lines(run: RunDirectory, config: LearnerConfig, summary: Json) -> list[str]:
    """Return a line for each command that may come next."""
    return [_line(name, command) for name, command in _next_commands(run, config, summary)]


def _next_commands(run: RunDirectory, config: LearnerConfig, summary: Json) -> Iterator[tuple[str, str]]:
    where = shlex.quote(str(run.path))
    train = f"seedrl {'run' if run.has_job else 'learner'} {where}"
    if summary["status"] == "failed":
        yield "look at", f"{shlex.quote(str(run.logs))}, or seedrl status {where}"
        yield "resume", train
    elif summary["status"] == "interrupted":
        yield "resume", train
    elif summary["env_steps"] < config.stop.env_steps:  # the return was reached
        yield from _uses(where, config)
        yield "train on", f"{train} stop.return_mean_100=null"
    else:
        yield "train on", f"{train} stop.env_steps={2 * max(config.stop.env_steps, summary['env_steps'])}"
        yield from _uses(where, config)


def _uses(where: str, config: LearnerConfig) -> Iterator[tuple[str, str]]:
    """Yield what can be done with a trained policy here; only actors have the environment `own`."""
    if is_own(config.env.id):
        yield "serve", f"seedrl serve {where}"
    else:
        yield "evaluate", f"seedrl eval {where}"
        if all(importlib.util.find_spec(package) for package in ("imageio", "imageio_ffmpeg")):
            yield "record", f"seedrl record {where}"
    yield "export", f"seedrl export {where}"


def learning_words(learning: dict[str, str]) -> list[str]:
    """Return the verdict on learning, and what to try if there is anything."""
    if not learning["evidence"]:
        return []
    change = [_line("", f"→ {learning['change']}")] if learning["change"] else []
    return [_line("learning", f"{learning['verdict']}: {learning['evidence']}"), *change]


def timing_tree(seconds_by_stage: dict[str, dict[str, float]]) -> list[str]:
    """Return how each thread spent its time; the stages are those of metrics and dashboards."""
    lines = []
    for thread, stages in seconds_by_stage.items():
        total = sum(stages.values()) or 1.0
        shares = [f"{stage} {seconds / total:.0%}" for stage, seconds in stages.items() if seconds / total >= 0.005]
        lines.append(_line(thread, f"{duration(total)}: {' · '.join(shares)}"))
    return lines


def _line(name: str, words: str) -> str:
    return f"  {name:<{WIDTH}} {words}"
