"""`seedrl bench render FILE.json [RESULTS.md]`: a page of tables and plots. Nothing in it is handwritten."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import plots
from bench.document import Document, Stage, ratios_of, read
from bench.harness import Ratio

Row = dict[str, Any]


def render(results: Path, page: Path) -> None:
    """Draws the plots beside the JSON file and writes the page."""
    document = read(results)
    plots.draw(document, results.parent)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text(document, results, page))
    print(f"written to {page}; plots in {results.parent}")


def text(document: Document, results: Path, page: Path) -> str:
    """The page. The same results always give the same text."""
    beside = os.path.relpath(results.parent, page.parent)
    source = os.path.relpath(results, page.parent)
    shown = plots.names(document)
    images = {name: f"![{name.replace('_', ' ')}]({os.path.join(beside, name)}.png)" for name in shown}
    parts = [
        "# Results",
        f"Generated from [{results.name}]({source}) by `seedrl bench render`; do not edit. "
        "The bench's README.md says what each stage compares, and how it is measured.",
        _machine(document),
        "## Headlines",
        _headlines(list(document.ratios.values())),
        images.get(plots.OVERVIEW, ""),
    ]
    for stage in document.stages:
        parts += _stage(stage, images.get(stage["stage"], ""))
    return "\n\n".join(part for part in parts if part) + "\n"


def _machine(document: Document) -> str:
    machine = document.fingerprint
    versions = ", ".join(f"{name} {version}" for name, version in machine.get("versions", {}).items() if version)
    rows = {
        "measured": machine.get("time"),
        "commit": f"{machine.get('commit')}{' with uncommitted changes' if machine.get('dirty') else ''}",
        "machine": f"{machine.get('cpu')}, {machine.get('cores')} cores, {machine.get('platform')}",
        "load before": _cell(machine.get("load")),
        "versions": f"Python {machine.get('python')}, {versions}",
        "took": f"{sum(stage.get('seconds', 0) for stage in document.stages) / 60:.1f} minutes",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def _headlines(ratios: Sequence[Ratio]) -> str:
    """Return the ratios that have a bound."""
    return _table([_ratio_row(ratio) for ratio in ratios if ratio.bound is not None])


def _ratio_row(ratio: Ratio) -> Row:
    row: Row = {"ratio": ratio.name, "median": ratio.value, "spread": _spread(ratio.values)}
    row |= {"repeats": len(ratio.values), "by wall time": _spread(ratio.wall) if ratio.wall else "–"}
    if ratio.bound is None:
        return {**row, "bound": f"none; {'less' if ratio.at_most else 'more'} is better", "verdict": "–"}
    relation = "≤" if ratio.at_most else "≥"
    return {**row, "bound": f"{relation} {ratio.bound:g}", "verdict": "met" if ratio.met else "**missed**"}


def _stage(stage: Stage, image: str) -> list[str]:
    others = [ratio for ratio in ratios_of(stage) if ratio.bound is None]
    machine = stage.get("fingerprint", {})
    when = (
        f"Measured {machine.get('time')} at commit {machine.get('commit')}, load {_cell(machine.get('load'))} before."
    )
    return [
        f"## {stage['stage'].replace('_', ' ').capitalize()}",
        when if machine else "",
        image,
        *_tables(stage["table"]),
        _table([_ratio_row(ratio) for ratio in others]),
        "\n".join(f"- {note}" for note in stage["notes"]),
    ]


def _tables(rows: Sequence[Row]) -> list[str]:
    """One table for all rows with the same columns."""
    by_columns: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        by_columns.setdefault(tuple(row), []).append(row)
    return [_table(alike) for alike in by_columns.values()]


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    columns = list(rows[0])
    numeric = {column: all(isinstance(row[column], int | float) for row in rows) for column in columns}
    lines = [
        "| " + " | ".join(columns) + " |",
        "|" + "|".join("--:" if numeric[name] else "---" for name in columns) + "|",
    ]
    lines += ["| " + " | ".join(_cell(row[column]) for column in columns) + " |" for row in rows]
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    return f"{_cell(min(values))} … {_cell(max(values))}"


def _cell(value: Any) -> str:
    """Three digits of a measurement; counts in full."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
