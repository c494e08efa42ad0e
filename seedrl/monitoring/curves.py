"""Reads run directories: the curve of each run, and which runs differ only in their seed. Draws nothing."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from seedrl.config import LearnerConfig
from seedrl.errors import ConfigError, RunDirectoryError
from seedrl.run.directory import RunDirectory, plain
from seedrl.run.finding import runs_below

# Sections or single settings that say where and how a run happened, and not what it was.
NOT_COMPARED = (
    *(
        "seed",
        "run_dir",
        "init_from",
        "callbacks",
        "callback_options",
        "listen",
        "socket",
        "security",
        "max_restarts",
        "display",
        "report",
        "metrics",
        "checkpoint",
        "device",
        "threads",
    ),
    *("actors.threads", "actors.max_restarts", "serving.shared_memory", "serving.graphs"),
)
MOST = 4  # settings in a label, if fewer can tell the runs apart
NUMBER = re.compile(r"((?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]))")
LARGEST = 1e100  # nothing measured is larger, and plots cannot show what is
COLUMNS = ("env_steps", "seconds", "return_mean_100", "eval_return_mean_100")
Point = tuple[float, float, float | None, float | None]  # the same
Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Curve:
    """One run: the mean return of the last 100 episodes, or of all so far, over steps and seconds. Both only grow."""

    run_dir: Path
    env: str
    seed: str
    settings: Settings  # those that make it another experiment, by their full names
    env_steps: np.ndarray  # [points]
    seconds: np.ndarray  # [points]
    returns: np.ndarray  # [points]; none before the first episode has ended
    evaluations: np.ndarray  # [points]; the same of evaluation episodes, NaN where there were none

    @property
    def score(self) -> float:
        return float(self.returns[-1])


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that differ in nothing but their seed."""

    env: str
    differs_in: str  # from the other groups of its environment, such as model.lstm=64; empty for nothing
    curves: tuple[Curve, ...]

    @property
    def label(self) -> str:
        return f"{self.env} {self.short_label}"

    @property
    def short_label(self) -> str:
        """Return the label for a place where the environment is known."""
        return f"{self.differs_in} ({self._count()})".lstrip()

    def _count(self) -> str:
        count = len(self.curves)
        noun = "seed" if len({curve.seed for curve in self.curves}) == count else "run"  # one seed run twice
        return f"{count} {noun}{'' if count == 1 else 's'}"


def find_runs(word: str) -> list[Path]:
    """Return a run directory itself, or all those below a directory; none for a file, which a shell's * may include."""
    path = Path(word)
    if not path.exists():
        raise ConfigError(f"there is no {word}; give run directories, or directories that hold some")
    return [run for run in runs_below(path) if (run / "metrics.jsonl").is_file()]


def read_curve(run_dir: Path) -> Curve:
    """Return the curve of a run, without points if no episode has ended. Raise RunDirectoryError on failure."""
    try:
        settings = flat(RunDirectory(run_dir).settings() or {})
        with (run_dir / "metrics.jsonl").open(errors="replace") as file:
            points = [row for row in _kept(_rows(file)) if row[2] is not None]
    except OSError as error:
        raise RunDirectoryError(f"{run_dir} cannot be read: {error.strerror}") from error
    settings = flat(plain(LearnerConfig())) | settings  # an older run lacks newer settings
    env_steps, seconds, returns, evaluations = np.array(points, float).reshape(-1, len(COLUMNS)).T
    compared = {key: value for key, value in settings.items() if not is_below(key, NOT_COMPARED)}
    seed = str(settings["seed"])
    return Curve(run_dir, str(settings["env.id"]), seed, compared, env_steps, seconds, returns, evaluations)


def _rows(lines: Iterator[str]) -> Iterator[Point]:
    """Yield the whole rows; a crash may have cut off the last one, or any before a resume."""
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            env_steps, seconds, score, evaluation = (_number(row.get(key)) for key in COLUMNS)
            if env_steps is not None and seconds is not None:
                yield env_steps, seconds, score, evaluation


def _kept(rows: Iterator[Point]) -> list[Point]:
    """Return the rows without those that a crash has undone: a resumed run continues from its checkpoint."""
    kept: list[Point] = []
    for row in rows:
        while kept and (kept[-1][0] >= row[0] or kept[-1][1] > row[1]):
            kept.pop()
        kept.append(row)
    return kept


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else None  # NaN is not less


def flat(settings: Settings, prefix: str = "") -> Settings:
    """Flatten nested settings: {"model": {"lstm": 64}} becomes {"model.lstm": 64}."""
    found: Settings = {}
    for name, value in settings.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def is_below(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def grouped(curves: Sequence[Curve]) -> list[Group]:
    """Return the groups, labelled by what distinguishes them in their environment and in the order of these labels.

    Environments are in the order of their first runs, and numbers in labels in the order of their size.
    """
    alike: dict[str, list[Curve]] = {}
    for curve in curves:
        alike.setdefault(json.dumps(curve.settings, sort_keys=True, default=str), []).append(curve)
    first_ones = [runs[0] for runs in alike.values()]
    groups = [Group(runs[0].env, _apart(runs[0], first_ones), tuple(runs)) for runs in alike.values()]
    envs = list(dict.fromkeys(group.env for group in groups))
    return sorted(groups, key=lambda group: (envs.index(group.env), _by_size(group.differs_in)))


def _by_size(label: str) -> list[tuple[float, str]]:
    """Return a key that sorts numbers in labels by their size, and what is between them as text."""
    parts = NUMBER.split(label)
    return [(float(part), "") if number % 2 else (math.inf, part) for number, part in enumerate(parts)]


def _apart(curve: Curve, others: Sequence[Curve]) -> str:
    """Return the settings in which groups differ; where they are many, some that tell all groups apart, and dots."""
    rivals = [other.settings for other in others if other.env == curve.env]
    keys = [key for key, value in curve.settings.items() if any(rival.get(key) != value for rival in rivals)]
    shown = keys if len(keys) <= MOST else _telling(keys, rivals)
    words = [f"{key}={as_typed(curve.settings.get(key))}" for key in shown]
    return " ".join(words + ["…"] * (len(shown) < len(keys)))


def _telling(keys: Sequence[str], rivals: Sequence[Settings]) -> list[str]:
    """Return few keys in which no two of these settings are the same, names first."""
    alike = list(combinations(rivals, 2))
    chosen: list[str] = []
    while alike:
        apart = {key: sum(one.get(key) != other.get(key) for one, other in alike) for key in keys}
        best = max(keys, key=lambda key: (apart[key], key.endswith(".name")))
        chosen.append(best)
        alike = [(one, other) for one, other in alike if one.get(best) == other.get(best)]
    return chosen


def as_typed(value: Any) -> str:
    """Format a value as on the command line: true, null, [64,64]."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)
