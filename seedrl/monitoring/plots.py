"""Draws learning curves: of one run, or of groups of seeds side by side. Does not read or judge runs.

The plots are readable without colours, because lines differ by dash as well.
"""

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seedrl.errors import ConfigError
from seedrl.monitoring.curves import Curve, Group, read_curve
from seedrl.monitoring.statistics import band
from seedrl.run.directory import write_atomically

CURVE = "curve.png"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
DASHES = ("-", "--", "-.", ":")
PANEL_INCHES = (4.6, 3.4)
LEGEND_INCHES = 0.2  # a line of it
LEGEND_CHARACTERS = 120  # that fit into its width
DPI = 150
POINTS = 100
UNITS = (("seconds", 1.0), ("minutes", 60.0), ("hours", 3600.0))


def draw_comparison(groups: Sequence[Group], references: Mapping[str, float], out: Path) -> None:
    """Draw the return over steps and over time, with a row for each environment and a line for each group.

    References are returns to compare with, by name: horizontal lines in every row.
    """
    rows = [[group for group in groups if group.env == env] for env in dict.fromkeys(group.env for group in groups)]
    legends = [_legend_shape([group.short_label for group in row]) for row in rows]
    width, height = PANEL_INCHES
    heights = [height + LEGEND_INCHES * lines for _, lines in legends]
    figure = new_figure(2 * width, sum(heights))
    parts = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, row, (columns, _) in zip(parts, rows, legends, strict=True):
        _compare(part, row, references, columns)
    save_figure(figure, out)


def draw_curve(run_dir: Path) -> Path | None:
    """Draw a run into its own directory and return the path; None without matplotlib, episodes or space on the disk."""
    try:
        curve = read_curve(run_dir)
        if not curve.returns.size:
            return None
        figure = new_figure(2 * PANEL_INCHES[0], PANEL_INCHES[1])
        for axes, xs, words in _panels(figure, [curve]):
            axes.plot(xs(curve), curve.returns, color=COLOURS[0], marker=_marker(curve), label="training")
            if np.isfinite(curve.evaluations).any():
                axes.plot(xs(curve), curve.evaluations, color=COLOURS[1], linestyle=DASHES[1], label="evaluation")
            _label(axes, words)
        axes.legend(fontsize=8, frameon=False)
        figure.suptitle(_literal(f"{curve.env}, seed {curve.seed}: {curve.score:,.2f}"), fontsize=10)
        save_figure(figure, run_dir / CURVE)
    except Exception:  # matplotlib and its settings may raise anything; a run does not fail because of a picture
        return None
    return run_dir / CURVE


def _compare(figure: Any, groups: Sequence[Group], references: Mapping[str, float], legend_columns: int) -> None:
    for axes, xs, words in _panels(figure, [curve for group in groups for curve in group.curves]):
        for number, group in enumerate(groups):
            style = {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)]}
            _line(axes, [xs(curve) for curve in group.curves], group, style)
        for name, value in references.items():
            _reference(axes, name, value)
        _label(axes, words)
    figure.suptitle(_literal(groups[0].env if len(groups) > 1 else groups[0].label), fontsize=10)
    if len(groups) > 1:
        figure.legend(*axes.get_legend_handles_labels(), **_legend_style(legend_columns))


def _line(axes: Any, xs: Sequence[np.ndarray], group: Group, style: dict[str, str]) -> None:
    """Draw the run itself if it is the only one; otherwise the interquartile mean of all with its 95 % interval."""
    label = _literal(textwrap.fill(group.short_label, LEGEND_CHARACTERS))
    if len(group.curves) == 1:
        curve = group.curves[0]
        axes.plot(xs[0], curve.returns, label=label, marker=_marker(curve), **style)
        return
    grid, values = on_common_grid(xs, [curve.returns for curve in group.curves])
    middle, low, high = band(values)
    axes.fill_between(grid, low, high, color=style["color"], alpha=0.18, linewidth=0)
    axes.plot(grid, middle, label=label, **style)


def _reference(axes: Any, name: str, value: float) -> None:
    """Draw a thin horizontal line, named above its left end."""
    axes.axhline(value, color="0.4", linewidth=0.8)
    axes.annotate(
        _literal(f"{name}: {value:,.10g}"),
        xy=(0, value),
        xycoords=("axes fraction", "data"),
        xytext=(3, 2),
        textcoords="offset points",
        fontsize=7,
        color="0.3",
    )


def on_common_grid(xs: Sequence[np.ndarray], returns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return points from the first to the last of any run, and the [runs, points] returns there.

    Before its first point a run has that point's return, and after its end its last: most end when they are solved.
    """
    grid = np.linspace(min(each[0] for each in xs), max(each[-1] for each in xs), POINTS)
    return grid, np.array([np.interp(grid, x, y) for x, y in zip(xs, returns, strict=True)])


def _panels(figure: Any, curves: Sequence[Curve]) -> list[tuple[Any, Any, str]]:
    """Return the axes, the function for a curve's x and its label: steps on the left, time on the right."""
    left, right = figure.subplots(1, 2, sharey=True)
    left.set_ylabel("mean return of up to 100 episodes")
    unit, size = _unit(max(curve.seconds[-1] for curve in curves))
    return [
        (left, lambda curve: curve.env_steps, "environment steps"),
        (right, lambda curve: curve.seconds / size, f"wall time, {unit}"),
    ]


def _unit(seconds: float) -> tuple[str, float]:
    """Return the largest unit of which there are three or more."""
    return next((unit for unit in reversed(UNITS) if seconds >= 3 * unit[1]), UNITS[0])


def _marker(curve: Curve) -> str | None:
    return "o" if curve.returns.size == 1 else None  # a line of one point is invisible


def _label(axes: Any, x: str) -> None:
    axes.set_xlabel(x)
    axes.tick_params(labelleft=True, labelsize=9)
    axes.locator_params(axis="x", nbins=5)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}" if abs(value) < 1e10 else f"{value:.3g}")
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _legend_shape(labels: Sequence[str]) -> tuple[int, int]:
    """Return the columns and lines of the legend below a row; no lines if there is only one group."""
    if len(labels) == 1:
        return 1, 0
    longest = max(len(label) for label in labels) + 10  # the line itself takes room, too
    columns = min(max(1, LEGEND_CHARACTERS // longest), len(labels))
    wraps = math.ceil(longest / LEGEND_CHARACTERS)
    return columns, math.ceil(len(labels) / columns) * wraps


def _legend_style(columns: int) -> dict[str, Any]:
    return {"loc": "outside lower center", "ncols": columns, "fontsize": 8, "frameon": False, "handlelength": 3}


def _literal(text: str) -> str:
    return text.replace("$", r"\$")  # between two of them would be a formula


def new_figure(width: float, height: float) -> Any:
    """Create a figure without pyplot, so without windows and global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"plots need matplotlib: pip install 'seedrl[plot]' ({error})") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, out: Path) -> None:
    kinds, kind = figure.canvas.get_supported_filetypes(), out.suffix.removeprefix(".").lower()
    if kind not in kinds:
        raise ConfigError(f"out={out} must end in one of .{', .'.join(sorted(kinds))}")
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=DPI)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, picture.getvalue())
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}; give another file as out=") from error
