"""Plots of what `seedrl bench` found: one of all headlines against their bounds, and one per stage. Measures nothing.

Readable in black and white: sides differ by marker and dash, not only by colour.
"""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.document import Document, Stage
from bench.harness import Ratio
from seedrl.errors import ConfigError
from seedrl.monitoring.statistics import band

OVERVIEW = "overview"
STYLES = (("o", "-", "#1f4e79"), ("s", "--", "#b8860b"), ("^", ":", "#6b6b6b"), ("D", "-.", "#8b1a1a"))
PANEL_INCHES = (4.6, 3.4)
TITLE_WIDTH = 44  # letters
DPI = 110
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Panel:
    """One column of a stage's table by another, a line for each value of `by` or for each of several columns."""

    x: str
    ys: tuple[str, ...]
    label: str = ""  # of the y axis, if not the column's name
    by: str = ""
    where: Callable[[Row], bool] = lambda row: True
    title: str = ""
    log_x: bool = True
    log_y: bool = False


def _is_service(row: Row) -> bool:
    return bool(row["side"] == "service")


def _is_plain(row: Row) -> bool:
    return bool(row["actors"] == 1 and row["in flight"] == 2 and row["transport"] == "unix")


def _steps_by_threads(env: str) -> Panel:
    return Panel(
        "threads",
        ("steps per second",),
        by="groups",
        where=lambda row: bool(row["env"] == env),
        title=env,
        log_x=False,
    )


PANELS: dict[str, tuple[Panel, ...]] = {
    "pool": (_steps_by_threads("Pong-v5"), _steps_by_threads("CartPole-v1")),
    "batcher": (Panel("producers", ("wait p50 µs", "wait p99 µs"), label="wait, µs", log_y=True),),
    "inference": (Panel("rows", ("rows per CPU-second",), by="side"),),
    "learner": (Panel("unrolls", ("steps per CPU-second",), by="side"),),
    "wire": (
        Panel(
            "rows",
            ("CPU µs per row",),
            by="side",
            where=lambda row: _is_plain(row) and row["bytes per row"] == 84 * 84,
            title="84×84 bytes per row, unix socket",
            log_y=True,
        ),
    ),
    "service": (
        Panel("actors", ("CPU µs per row",), where=lambda row: row["envs"] == 128 * row["actors"] and _is_service(row)),
        Panel("envs", ("CPU µs per row",), where=lambda row: "batches of 128" in row["side"]),
    ),
}


def draw(document: Document, directory: Path) -> None:
    """Writes every plot there is something to draw for."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, figure in _figures(document):
        # Without the version of matplotlib, so that the same results give the same file.
        figure.savefig(directory / f"{name}.png", dpi=DPI, metadata={"Software": None})


def names(document: Document) -> list[str]:
    """The plots that `draw` makes, without drawing them."""
    overview = [OVERVIEW] if _headlines(document) else []
    return [*overview, *(stage["stage"] for stage in document.stages if stage["stage"] in {*PANELS, *OWN})]


def _figures(document: Document) -> Iterator[tuple[str, Any]]:
    if headlines := _headlines(document):
        yield OVERVIEW, overview(headlines)
    for stage in document.stages:
        name = stage["stage"]
        try:
            if name in PANELS:
                yield name, panels(stage, PANELS[name])
            elif name in OWN:
                yield name, OWN[name](stage)
        except KeyError as error:
            raise ConfigError(f"the results of stage {name} have no {error}: bench/plots.py expects it") from error


def _headlines(document: Document) -> list[Ratio]:
    return [ratio for ratio in document.ratios.values() if ratio.bound is not None]


def overview(ratios: Sequence[Ratio]) -> Any:
    """Draw how much of its bound every headline uses: up to 1 is met, whichever direction is the good one."""
    figure = _figure(1, inches=(7.6, 1.1 + 0.36 * len(ratios)))
    axes = figure.subplots()
    for line, ratio in enumerate(reversed(ratios)):
        used = sorted(_used(ratio, value) for value in ratio.values)
        middle = _used(ratio, ratio.value)
        axes.plot([used[0], used[-1]], [line, line], color="black", linewidth=1)
        axes.plot(middle, line, "o", color="black", markerfacecolor="black" if ratio.met else "white", markersize=7)
        relation = "≤" if ratio.at_most else "≥"
        axes.annotate(
            f"{ratio.value:.3g}, wanted {relation} {ratio.bound:g}",
            (1.02, line),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
        )
    axes.axvline(1, color="black", linestyle="--", linewidth=1)
    axes.set_yticks(range(len(ratios)), [ratio.name for ratio in reversed(ratios)], fontsize=8)
    axes.set_ylim(-0.6, len(ratios) - 0.4)
    axes.set_xlabel("share of the bound used; left of the line is met (filled), bars span all repeats", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _used(ratio: Ratio, value: float) -> float:
    assert ratio.bound is not None
    return value / ratio.bound if ratio.at_most else ratio.bound / value


def panels(stage: Stage, shown: Sequence[Panel]) -> Any:
    """Lines over the stage's table, side by side."""
    figure = _figure(len(shown))
    for axes, panel in zip(np.atleast_1d(figure.subplots(1, len(shown))), shown, strict=True):
        rows = [row for row in stage["table"] if panel.x in row and panel.where(row)]
        _lines(axes, panel, rows)
        _label(axes, panel.x, panel.label or panel.ys[0], panel.title)
    return figure


def _lines(axes: Any, panel: Panel, rows: Sequence[Row]) -> None:
    groups = sorted({row[panel.by] for row in rows}, key=_by_size) if panel.by else [None]
    series = [(group, y) for group in groups for y in panel.ys]
    for (group, y), (marker, dash, colour) in zip(series, STYLES, strict=False):
        points = sorted((row[panel.x], row[y]) for row in rows if group is None or row[panel.by] == group)
        label = y if group is None else str(group) if panel.by == "side" else f"{panel.by} {group}"
        axes.plot(*zip(*points, strict=True), marker=marker, linestyle=dash, color=colour, label=label)
    if panel.log_x:
        axes.set_xscale("log", base=2)
    _plain_ticks(axes.xaxis, sorted({row[panel.x] for row in rows}))
    if panel.log_y:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.08 * max(row[y] for row in rows for y in panel.ys))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    if len(series) > 1:
        axes.legend(fontsize=8, frameon=False)


def _by_size(value: Any) -> tuple[bool, Any]:
    return isinstance(value, str), value


def learning(stage: Stage) -> Any:
    """Return by steps and by seconds: every seed thinly, their interquartile mean with its 95 % interval."""
    curves = stage["detail"]["curves"]
    tasks = list(dict.fromkeys(curve["task"] for curve in curves))
    figure = _figure(2, rows=len(tasks))
    for row, task in zip(figure.subplots(len(tasks), 2, squeeze=False), tasks, strict=True):
        runs = [curve for curve in curves if curve["task"] == task]
        for axes, key, words in zip(row, ("env_steps", "seconds"), ("environment steps", "seconds"), strict=True):
            _curves(axes, runs, key)
            title = f"{task}, {len(runs)} seed{'s' * (len(runs) > 1)}"
            _label(axes, words, "mean return of 100 episodes", textwrap.fill(title, TITLE_WIDTH))
            axes.locator_params(axis="x", nbins=5, integer=True)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    return figure


def _curves(axes: Any, runs: Sequence[Row], key: str) -> None:
    grid = np.linspace(min(run[key][0] for run in runs), max(run[key][-1] for run in runs), 100)
    # Before its first point a run has that point's return; after its end, its last: it has reached the score.
    values = np.array([np.interp(grid, run[key], run["returns"]) for run in runs])
    for run in runs:
        axes.plot(run[key], run["returns"], color="0.7", linewidth=0.7)
    middle, low, high = band(values)
    axes.fill_between(grid, low, high, color="0.85", label="95 %")
    axes.plot(grid, middle, color="black", label="interquartile mean")
    axes.axhline(runs[0]["target"], color="black", linestyle="--", linewidth=0.8, label=f"{runs[0]['target']:g}")
    axes.legend(fontsize=8, frameon=False, loc="lower right")


def weights_or_observations(stage: Stage) -> Any:
    """CPU per step of either way, by how many steps an actor takes between publishes."""
    cases = stage["detail"]
    figure = _figure(len(cases))
    for axes, (name, costs) in zip(np.atleast_1d(figure.subplots(1, len(cases))), cases.items(), strict=True):
        steps = np.logspace(0, 4, 100)
        lines = {
            "weights": costs["weights"] + costs["publish"] / steps,
            "observations": np.full_like(steps, costs["observations"]),
            "observations, accelerator": np.full_like(steps, costs["observations with accelerator"]),
        }
        for (label, values), (_, dash, colour) in zip(lines.items(), STYLES, strict=False):
            axes.plot(steps, values, linestyle=dash, color=colour, label=label)
        for way in ("observations", "observations with accelerator"):
            if costs[way] > costs["weights"]:
                axes.plot(costs["publish"] / (costs[way] - costs["weights"]), costs[way], "ko", markersize=6)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(steps[0], steps[-1])
        _label(axes, "steps of an actor between publishes", "CPU µs per environment step", name.replace("_", ", "))
        axes.legend(fontsize=8, frameon=False)
    return figure


def end_to_end(stage: Stage) -> Any:
    """CPU time of one step of Pong: its parts alone, and the processes of a run."""
    figure = _figure(1, inches=(6.4, 2.2))
    axes = figure.subplots()
    for line, column in enumerate(("ms in the run", "ms alone")):
        left = 0.0
        for row in (row for row in stage["table"] if column in row):
            axes.barh(line, row[column], left=left, color="white", edgecolor="black", height=0.6)
            axes.text(
                left + row[column] / 2, line, row["part"].replace(" ", "\n"), ha="center", va="center", fontsize=8
            )
            left += row[column]
    axes.set_yticks((0, 1), ("in the run", "alone"), fontsize=8)
    _label(axes, "CPU ms per step", "", "Pong, Nature CNN")
    return figure


def peers(stage: Stage) -> Any:
    """Steps per second of every side, by what it was asked to do."""
    asked = list(dict.fromkeys(row["env"] for row in stage["table"]))
    figure = _figure(len(asked))
    for axes, env in zip(np.atleast_1d(figure.subplots(1, len(asked))), asked, strict=True):
        rows = sorted((row for row in stage["table"] if row["env"] == env), key=lambda row: row["steps per second"])
        colours = ["black" if row["side"].startswith("seedrl") else "white" for row in rows]
        axes.barh(
            [row["side"] for row in rows], [row["steps per second"] for row in rows], color=colours, edgecolor="black"
        )
        _label(axes, "steps per second", "", env)
    return figure


def simulation(stage: Stage) -> Any:
    """Checked, then predicted: simulated over measured; steps, latency and lag by actors; steps by ranks and links."""
    figure = _figure(3, rows=2)
    (checked, steps, latency), (lag, ranks, links) = figure.subplots(2, 3)
    checks = [row for row in stage["table"] if row.get("of") in ("steps/s", "round trip ms")]
    for of, (marker, _, colour) in zip(("steps/s", "round trip ms"), STYLES, strict=False):
        rows = [row for row in checks if row["of"] == of]
        ratios = [row["simulated"] / row["measured"] for row in rows]
        checked.plot(ratios, [row["check"] for row in rows], marker, color=colour, label=of)
    checked.axvline(1, color="black", linestyle="--", linewidth=1)
    checked.legend(fontsize=8, frameon=False)
    _label(checked, "simulated / measured", "", "whole runs, environments that sleep")
    rack = Panel("actors", ("steps/s",), where=lambda row: row["size"] == "one rack", log_y=True)
    for axes, ys, label in (
        (steps, ("steps/s",), "steps per second"),
        (latency, ("p50 ms", "p99 ms"), "ms to an action"),
        (lag, ("policy lag",), "policy lag, updates"),
    ):
        _predicted(axes, stage, replace(rack, ys=ys, label=label, title="one rank, 10 Gbit/s"))
    thousand = replace(rack, x="ranks", where=lambda row: row["size"] == "a thousand actors", title="a thousand actors")
    _predicted(ranks, stage, replace(thousand, label="steps per second"))
    by_link = replace(
        rack, x="Gbit/s", where=lambda row: row["size"] == "one rack by link", title="32 actors, one rank"
    )
    _predicted(links, stage, replace(by_link, label="steps per second"))
    return figure


def _predicted(axes: Any, stage: Stage, panel: Panel) -> None:
    rows = [row for row in stage["table"] if "size" in row and panel.where(row)]
    _lines(axes, panel, rows)
    _label(axes, panel.x, panel.label, panel.title)


OWN: dict[str, Callable[[Stage], Any]] = {
    "simulation": simulation,
    "end_to_end": end_to_end,
    "peers": peers,
    "learning": learning,
    "weights_or_observations": weights_or_observations,
}


def _figure(columns: int, rows: int = 1, inches: tuple[float, float] | None = None) -> Any:
    """Without pyplot: no windows and no state."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError(f"plots need matplotlib: pip install -c constraints.txt -e '.[bench]' ({error})") from error
    width, height = PANEL_INCHES
    return Figure(figsize=inches or (width * columns, height * rows), layout="constrained")


def _label(axes: Any, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)


def _plain_ticks(axis: Any, values: Sequence[float]) -> None:
    """At what was measured and nowhere else."""
    axis.set_ticks(values, [f"{value:g}" for value in values])
    axis.set_tick_params(which="minor", bottom=False)
