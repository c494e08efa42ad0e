"""How everything here is measured: sides interleaved, CPU time beside wall time, medians and spread over repeats.

A machine is never quiet for long. So a headline is a *ratio* of two sides measured in turns within one run, and its
spread is that of the ratios of neighbouring turns.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one side: how much was done, in how much wall and CPU time."""

    count: float
    wall: float
    cpu: float

    @property
    def rate(self) -> float:
        return self.count / self.wall

    @property
    def per_cpu(self) -> float:
        return self.count / self.cpu

    @property
    def cpu_us(self) -> float:
        return 1e6 * self.cpu / self.count


@dataclass(frozen=True, slots=True)
class Ratio:
    """A headline: the median over repeats, its spread, and the bound it has to meet."""

    name: str
    values: list[float]
    bound: float | None = None
    at_most: bool = True

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        if self.bound is None:
            return None
        return self.value <= self.bound if self.at_most else self.value >= self.bound

    def sentence(self) -> str:
        spread = f"{min(self.values):.3g}…{max(self.values):.3g}"
        if self.bound is None:
            return f"{self.name} {self.value:.3g} ({spread})"
        relation, verdict = ("≤" if self.at_most else "≥"), ("met" if self.met else "MISSED")
        return f"{self.name} {self.value:.3g} ({spread}), wanted {relation} {self.bound:g}: {verdict}"


@dataclass
class Report:
    """What a stage found."""

    stage: str
    ratios: list[Ratio] = field(default_factory=list)
    table: list[dict[str, Any]] = field(default_factory=list)  # one row per configuration measured
    notes: list[str] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        """Records a row and shows it, so that long stages show progress."""
        self.table.append(row)
        print("  " + "  ".join(f"{name} {_short(value)}" for name, value in row.items()), flush=True)

    def add_ratio(self, ratio: Ratio) -> None:
        self.ratios.append(ratio)
        print("  " + ratio.sentence(), flush=True)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print("  " + text, flush=True)

    def as_json(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "ratios": {ratio.name: ratio.value for ratio in self.ratios},
            "spread": {ratio.name: [min(ratio.values), max(ratio.values)] for ratio in self.ratios},
            "repeats": {ratio.name: ratio.values for ratio in self.ratios},
            "bounds": {
                ratio.name: {"bound": ratio.bound, "at_most": ratio.at_most, "met": ratio.met}
                for ratio in self.ratios
                if ratio.bound is not None
            },
            "table": self.table,
            "notes": self.notes,
            "fingerprint": fingerprint(),
        }


def interleave(sides: dict[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Every side once per repeat, in turns; the order alternates so that neither side always goes first."""
    turns: dict[str, list[T]] = {name: [] for name in sides}
    for repeat in range(repeats):
        names = list(sides) if repeat % 2 == 0 else list(reversed(sides))
        for name in names:
            turns[name].append(sides[name]())
    return turns


def paired(turns: dict[str, list[Turn]], above: str, below: str, measure: Callable[[Turn], float]) -> list[float]:
    """The ratio of two sides, repeat by repeat."""
    return [measure(a) / measure(b) for a, b in zip(turns[above], turns[below], strict=True)]


def per_cpu(turn: Turn) -> float:
    return turn.per_cpu


def median(turns: Sequence[Turn], measure: Callable[[Turn], float]) -> float:
    return statistics.median(measure(turn) for turn in turns)


def run_for(seconds: float, work: Callable[[], int]) -> Turn:
    """Repeats `work`, which returns how much it did, for a while; CPU is of this process."""
    count, began, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        count += work()
    return Turn(count, time.perf_counter() - began, time.process_time() - cpu)


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time of these processes so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def children(commands: Sequence[Sequence[str]], **options: Any) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that end with the block, whatever happens."""
    processes = [subprocess.Popen(command, text=True, stdout=subprocess.DEVNULL, **options) for command in commands]
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def fingerprint() -> dict[str, Any]:
    """The machine and the versions a figure belongs to."""
    packages = ("seedrl", "torch", "grpcio", "protobuf", "numpy", "envpool")
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": sys.version.split()[0],
        "versions": {name: _version(name) for name in packages},
    }


def write(path: Path, reports: Sequence[Report]) -> None:
    """One stage's JSON, or all of a suite's under `stages` with the ratios of all on top."""
    documents = [report.as_json() for report in reports]
    document = documents[0]
    if len(documents) > 1:
        document = {
            "ratios": {name: value for each in documents for name, value in each["ratios"].items()},
            "stages": documents,
            "fingerprint": fingerprint(),
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
