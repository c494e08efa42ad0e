"""The counters and the clock of a run, over its restarts and its ranks. Knows nothing of files or communication."""

import time
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from seedrl.metrics import LearningMetrics, ServingMetrics, restore_totals, totals_of

SAME_ON_ALL_RANKS = ("updates", "gradient_steps", "skipped_updates")  # counters that are not summed
RETURNS_KEPT = 100  # of the last episodes

Counts = dict[str, Any]  # JSON


def score_of(counts: Counts) -> float | None:
    """Return the mean return once there are a hundred episodes: a lucky first one is not the best policy."""
    returns = counts["returns"]
    return sum(returns) / len(returns) if len(returns) == RETURNS_KEPT else None


def counts_of(serving: ServingMetrics, learning: LearningMetrics) -> Counts:
    """Return the counters of one rank, as JSON."""
    return {
        "serving": totals_of(serving),
        "learning": totals_of(learning),
        "returns": list(serving.returns.copy()),
        "lengths": list(serving.lengths.copy()),
        "eval_returns": list(serving.eval_returns.copy()),
    }


def sum_over_ranks(counts: Sequence[Counts]) -> Counts:
    """Return the counters of all ranks together. Updates are the same on all; each rank has a share of the returns."""
    first = counts[0]
    if len(counts) == 1:
        return first
    return {
        "serving": _sum([each["serving"] for each in counts]),
        "learning": {
            **_sum([each["learning"] for each in counts]),
            **{name: first["learning"][name] for name in SAME_ON_ALL_RANKS},
        },
        **{name: _newest([each[name] for each in counts]) for name in ("returns", "lengths", "eval_returns")},
    }


def _sum(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], dict):
        return {name: _sum([part[name] for part in parts]) for name in parts[0]}
    if isinstance(parts[0], list):
        return [sum(column) for column in zip(*parts, strict=True)]
    return sum(parts)


def _newest(lists: Sequence[list[float]]) -> list[float]:
    """Return the newest values of all lists, taken in turns; oldest first, as in the lists."""
    turns = zip_longest(*(reversed(each) for each in lists))
    newest = [value for turn in turns for value in turn if value is not None]
    return newest[:RETURNS_KEPT][::-1]


def restore_counters(
    counts: Mapping[str, Any], serving: ServingMetrics, learning: LearningMetrics, rank: int = 0
) -> None:
    """Restore the counters of a checkpoint; call it before anything counts.

    Rank 0 gets the counters of all ranks, the others only those that are the same on all: the sum over ranks continues.
    """
    if rank:
        restore_totals(learning, {name: counts["learning"][name] for name in SAME_ON_ALL_RANKS})
        return
    restore_totals(serving, counts["serving"])
    restore_totals(learning, counts["learning"])
    serving.returns.extend(counts["returns"])
    serving.lengths.extend(counts["lengths"])
    serving.eval_returns.extend(counts.get("eval_returns", []))


class RunClock:
    """Measures how long the run has taken, earlier processes included."""

    def __init__(self) -> None:
        self.seconds_before = 0.0
        self._began: float | None = None  # not yet: a run that is done already takes no more time

    def start(self) -> None:
        """Count from now on."""
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return self.seconds_before + (0.0 if self._began is None else time.monotonic() - self._began)
