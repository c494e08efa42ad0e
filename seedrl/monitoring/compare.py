"""`seedrl plot`: compares runs in a table and in a plot. Trains nothing and changes no run."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from seedrl.config import PlotConfig
from seedrl.errors import ConfigError, RunDirectoryError
from seedrl.monitoring.curves import Curve, Group, find_runs, grouped, read_curve
from seedrl.monitoring.plots import draw_comparison
from seedrl.monitoring.statistics import bootstrap, iqm
from seedrl.run.finding import newest_run

HEADER = ["group", "runs", "final return", "95 %", "steps", "seconds", "steps/s"]


def run_plot(config: PlotConfig) -> None:
    print(table(draw_runs(_runs(config.runs), Path(config.out), config.references)))
    print(f"drawn in {config.out}: interquartile means over runs, bands are bootstrap 95 % intervals")


def draw_runs(runs: Sequence[Path], out: Path, references: Mapping[str, float] = MappingProxyType({})) -> list[Group]:
    """Draw runs into a file, with lines at returns to compare with, and return them in groups of equal settings."""
    groups = grouped(list(_curves(runs)))
    if not groups:
        raise ConfigError(f"nothing to plot: no episode has ended in any run of {' '.join(map(str, runs))}")
    draw_comparison(groups, references, out)
    return groups


def _runs(words: Sequence[str]) -> list[Path]:
    """Return every run once, however often it is named; without a name the newest."""
    words = words or [str(newest_run())]
    found: dict[Path, Path] = {}
    for word in words:
        for run in find_runs(word):
            found.setdefault(run.resolve(), run)
    if not found:
        raise ConfigError(f"there is no run in {' '.join(words)}: none holds config.yaml and metrics.jsonl")
    return list(found.values())


def _curves(runs: Sequence[Path]) -> Iterator[Curve]:
    for run in runs:
        try:
            curve = read_curve(run)
        except RunDirectoryError as error:
            print(f"{run} is left out: {error}")
            continue
        if curve.returns.size:
            yield curve
        else:
            print(f"{run} is left out: no episode has ended in it")


def table(groups: Sequence[Group]) -> str:
    """Return a table with a line for each group."""
    lines = [HEADER, *(_cells(group) for group in groups)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )


def _cells(group: Group) -> list[str]:
    scores = np.array([curve.score for curve in group.curves])
    steps = [curve.env_steps[-1] for curve in group.curves]
    seconds = [curve.seconds[-1] for curve in group.curves]
    speeds = np.array([step / max(second, 1e-3) for step, second in zip(steps, seconds, strict=True)])
    low, high = bootstrap(scores)
    return [
        f"{group.env} {group.differs_in}".rstrip(),
        str(len(scores)),
        f"{iqm(scores):,.2f}",
        f"{low:,.2f}…{high:,.2f}" if len(scores) > 1 else "–",
        _span([f"{value:,.0f}" for value in sorted(steps)]),
        _span([f"{value:,.1f}" for value in sorted(seconds)]),
        f"{iqm(speeds):,.0f}",
    ]


def _span(ordered: Sequence[str]) -> str:
    return ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]}…{ordered[-1]}"
