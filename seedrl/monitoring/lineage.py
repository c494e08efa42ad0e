"""A picture of a population: which run began with whose weights, and what each reached. Trains nothing."""

import json
from pathlib import Path
from typing import Any

from seedrl.monitoring.plots import COLOURS, new_figure, save_figure

INCHES = (7.0, 4.2)
OWN = {"color": "0.75", "linewidth": 1}
ANOTHERS = {"color": "#D55E00", "linewidth": 2, "linestyle": "--"}


def draw_lineage(journal: Path, out: Path) -> None:
    """Draw the runs of a journal by generation and score; a line leads from each to the run it began with."""
    decisions: list[dict[str, Any]] = [json.loads(line) for line in journal.read_text().splitlines()]
    drawn = {each["run"]: each for each in decisions if each["score"] is not None}
    figure = new_figure(*INCHES)
    axes = figure.subplots()
    for each in drawn.values():
        parent = drawn.get(each["parent"])
        if parent is not None:
            ends = [(one["generation"], one["score"]) for one in (parent, each)]
            axes.plot(*zip(*ends, strict=True), zorder=1, **(OWN if parent["member"] == each["member"] else ANOTHERS))
        place = (each["generation"], each["score"])
        axes.scatter(*place, color=COLOURS[each["member"] % len(COLOURS)], zorder=2)
        axes.annotate(str(each["member"]), place, textcoords="offset points", xytext=(6, 4), fontsize=8)
    axes.set_xticks(sorted({each["generation"] for each in decisions}))
    axes.set_xlabel("generation")
    axes.set_ylabel("best mean return of 100 episodes")
    axes.set_title("Members by number. Dashed: weights and settings of another member.", fontsize=9)
    save_figure(figure, out)
