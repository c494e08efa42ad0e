"""`seedrl bench compare A.json B.json`: what got better or worse from A to B, and what is only noise.

A change counts when a rank test over the repeats of both files is sure of it (p ≤ 0.01, since there are a dozen ratios
to be wrong about) and it is large enough to matter: two runs of the same code differ a little for reasons that lie
between runs, which repeats within a run cannot show.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.document import Document, read
from bench.harness import Ratio

SURE = 0.01
MATERIAL = 0.02  # of the ratio; less is the same, however sure
MAX_ORDERS = 20_000  # orders of the repeats that are tried out; of more, as many at random
BUSY = 0.25  # load per core before the run that makes figures doubtful

BETTER, WORSE, SAME, UNSURE = "better", "worse", "same within noise", "too few repeats to tell"


@dataclass(frozen=True, slots=True)
class Change:
    before: Ratio
    after: Ratio

    @property
    def relative(self) -> float:
        return self.after.value / self.before.value - 1

    @property
    def verdict(self) -> str:
        if abs(self.relative) < MATERIAL:
            return SAME
        if smallest_p(len(self.before.values), len(self.after.values)) > SURE:
            return UNSURE
        if rank_test(self.before.values, self.after.values) > SURE:
            return SAME
        return BETTER if (self.relative < 0) == self.after.at_most else WORSE


def compare(before: Path, after: Path) -> int:
    """Prints the verdicts. The exit code: 1 if something got worse."""
    a, b = read(before), read(after)
    for warning in doubts(a, b):
        print(f"warning: {warning}")
    changes = [Change(a.ratios[name], b.ratios[name]) for name in a.ratios if name in b.ratios]
    print(table_of(changes))
    for path, ratios, others in ((before, a.ratios, b.ratios), (after, b.ratios, a.ratios)):
        if alone := [name for name in ratios if name not in others]:
            print(f"only in {path}: {', '.join(alone)}")
    worse = [change.before.name for change in changes if change.verdict == WORSE]
    print(f"worse: {', '.join(worse)}" if worse else "nothing is worse")
    return 1 if worse else 0


def table_of(changes: Sequence[Change]) -> str:
    return _aligned([("ratio", "before", "after", "change", "verdict"), *(_row(change) for change in changes)])


def doubts(before: Document, after: Document) -> Iterator[str]:
    """Why the two may not be comparable."""
    a, b = before.fingerprint, after.fingerprint
    for key in ("cpu", "cores", "platform", "python"):
        if a.get(key) != b.get(key):
            yield f"{key} differs: {a.get(key)} before, {b.get(key)} after"
    old, new = a.get("versions", {}), b.get("versions", {})
    for package in sorted(old.keys() | new.keys()):
        if old.get(package) != new.get(package):
            yield f"{package} differs: {old.get(package)} before, {new.get(package)} after"
    for name, machine in (("before", a), ("after", b)):
        load, cores = machine.get("load", 0.0), machine.get("cores", 1)
        if load > BUSY * cores:
            yield f"the machine was busy {name}: load {load:.1f} on {cores} cores"


def rank_test(a: Sequence[float], b: Sequence[float]) -> float:
    """Wilcoxon's rank-sum test, two-sided and exact, ties included: how often chance alone separates them as much."""
    ranks = _ranks([*a, *b])
    expected = len(a) * ranks.mean()
    seen = abs(ranks[: len(a)].sum() - expected)
    sums = np.array([ranks[list(chosen)].sum() for chosen in _orders(len(ranks), len(a))])
    return float(np.mean(np.abs(sums - expected) >= seen - 1e-9))


def smallest_p(a: int, b: int) -> float:
    """The most that so few repeats can show: every one of one side above all of the other."""
    return 2 / math.comb(a + b, a)


def _ranks(values: Sequence[float]) -> np.ndarray:
    """From 1 on, ties sharing the mean of theirs."""
    array = np.asarray(values)
    below = (array[:, None] > array).sum(1)
    ranks: np.ndarray = below + ((array[:, None] == array).sum(1) + 1) / 2
    return ranks


def _orders(total: int, chosen: int) -> Iterator[Sequence[int]]:
    """Yield which of all repeats could have been those of the first file."""
    if math.comb(total, chosen) <= MAX_ORDERS:
        yield from itertools.combinations(range(total), chosen)
        return
    generator = np.random.default_rng(1)
    for _ in range(MAX_ORDERS):
        yield generator.permutation(total)[:chosen].tolist()


def _row(change: Change) -> tuple[str, ...]:
    return (
        change.before.name,
        _value(change.before),
        _value(change.after),
        f"{100 * change.relative:+.1f} %",
        change.verdict,
    )


def _value(ratio: Ratio) -> str:
    return f"{ratio.value:.3g} ({min(ratio.values):.3g}…{max(ratio.values):.3g}, {len(ratio.values)})"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
