"""What a run has counted, over its restarts and over its ranks. Knows nothing of files or of how ranks talk."""

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from seedrl.metrics import LearningMetrics, ServingMetrics, restore_totals, totals_of

EVERYBODYS = ("updates", "skipped_updates")  # counters that are the same on all ranks
RETURNS_KEPT = 100  # of the last episodes

Counts = dict[str, Any]  # JSON


def score_of(counts: Counts) -> float | None:
    """The mean return, once it is one of a hundred episodes: a lucky first one is not the best policy."""
    returns = counts["returns"]
    return sum(returns) / len(returns) if len(returns) == RETURNS_KEPT else None


def counts_of(serving: ServingMetrics, learning: LearningMetrics) -> Counts:
    """What one rank has counted, as JSON."""
    return {
        "serving": totals_of(serving),
        "learning": totals_of(learning),
        "returns": list(serving.returns.copy()),
        "lengths": list(serving.lengths.copy()),
        "eval_returns": list(serving.eval_returns.copy()),
    }


def joined(counts: Sequence[Counts]) -> Counts:
    """What all ranks together have counted. Updates are everybody's; of the last episodes each rank has its share."""
    first = counts[0]
    if len(counts) == 1:
        return first
    return {
        "serving": _sum([each["serving"] for each in counts]),
        "learning": {
            **_sum([each["learning"] for each in counts]),
            **{name: first["learning"][name] for name in EVERYBODYS},
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
    """The newest of each, in turns; oldest first, as they are."""
    turns = zip_longest(*(reversed(each) for each in lists))
    newest = [value for turn in turns for value in turn if value is not None]
    return newest[:RETURNS_KEPT][::-1]


def restore_counters(
    counts: Mapping[str, Any], serving: ServingMetrics, learning: LearningMetrics, rank: int = 0
) -> None:
    """Before anything counts: whoever looks sees them go on, and nobody else writes them yet.

    Rank 0 carries what all have counted, and the others only what is everybody's: so the sum over ranks goes on.
    """
    if rank:
        restore_totals(learning, {name: counts["learning"][name] for name in EVERYBODYS})
        return
    restore_totals(serving, counts["serving"])
    restore_totals(learning, counts["learning"])
    serving.returns.extend(counts["returns"])
    serving.lengths.extend(counts["lengths"])
    serving.eval_returns.extend(counts.get("eval_returns", []))
