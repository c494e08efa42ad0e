"""The runs of a sweep and how they ended, in a table and in sweep.csv. Starts no run."""

import csv
import io
import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from seedrl.errors import ConfigError, SeedrlError
from seedrl.monitoring.curves import read_curve
from seedrl.run.directory import write_atomically

TABLE = "sweep.csv"


class Status(StrEnum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


class Score(NamedTuple):
    """The mean returns of up to 100 episodes that a run has had."""

    best: float  # the largest, which is noise while few episodes have ended
    newest: float


@dataclass
class Member:
    """One run of a sweep. Owned by the main thread."""

    number: int
    overrides: list[str]  # only those in which the runs of the sweep differ
    directory: Path
    status: Status = Status.RUNNING
    env_steps: int = 0
    best_return: float | None = None  # the largest mean return of 100 episodes
    newest_return: float | None = None  # the last one
    reason: str = field(default="")  # why it failed

    @property
    def name(self) -> str:
        return f"run {self.number} ({' '.join(self.overrides)})" if self.overrides else f"run {self.number}"

    @property
    def score(self) -> Score | None:
        """Return what counts for a search; None if the run failed, or no episode has ended."""
        if self.status is not Status.DONE or self.best_return is None or self.newest_return is None:
            return None
        return Score(self.best_return, self.newest_return)

    @property
    def was_interrupted(self) -> bool:
        """Tell whether the run itself says that it was asked to stop before its end."""
        return _summary(self.directory).get("status") == "interrupted"

    def end(self, status: Status, reason: str = "") -> None:
        """Note how it ended, and what it has reached by then."""
        self.status, self.reason = status, reason
        summary = _summary(self.directory)
        self.env_steps = int(summary.get("env_steps", 0))
        try:
            returns = read_curve(self.directory).returns
        except SeedrlError:  # it has not begun
            return
        if returns.size:
            self.best_return, self.newest_return = float(returns.max()), float(returns[-1])


def _summary(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / "summary.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_table(directory: Path, members: Iterable[Member]) -> None:
    """Write sweep.csv."""
    text = io.StringIO()
    rows = csv.DictWriter(text, [each.name for each in fields(Member)], lineterminator="\n")
    rows.writeheader()
    for member in members:
        rows.writerow(asdict(member) | {"overrides": shlex.join(member.overrides)})
    write_atomically(directory / TABLE, text.getvalue())


def read_table(directory: Path) -> dict[int, Member]:
    """Return the runs that sweep.csv lists; none if there is no such file."""
    try:
        rows = list(csv.DictReader(io.StringIO((directory / TABLE).read_text())))
        return {int(row["number"]): _member(row) for row in rows}
    except FileNotFoundError:
        return {}
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(f"{directory / TABLE} cannot be read: {error}; give another sweep.dir") from error


def _member(row: dict[str, str]) -> Member:
    """Return a run; one that an earlier process has left running was interrupted."""
    status = Status(row["status"])
    return Member(
        int(row["number"]),
        shlex.split(row["overrides"]),
        Path(row["directory"]),
        Status.INTERRUPTED if status is Status.RUNNING else status,
        int(row["env_steps"]),
        float(row["best_return"]) if row["best_return"] else None,
        float(row["newest_return"]) if row["newest_return"] else None,
        row["reason"],
    )


def table(members: Sequence[Member]) -> str:
    """Return the runs as lines for the terminal, with why some failed below."""
    lines = [["run", "status", "steps", "best return", "settings", "directory"]]
    lines += [
        [
            str(member.number),
            member.status,
            f"{member.env_steps:,}",
            "–" if member.best_return is None else f"{member.best_return:,.2f}",
            " ".join(member.overrides),
            str(member.directory),
        ]
        for member in members
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    aligned = [
        "  ".join(
            cell.rjust(width) if column in (0, 2, 3) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    failed = [f"run {member.number} failed: {member.reason}" for member in members if member.status is Status.FAILED]
    return "\n".join([*aligned, *failed])
