"""Measures everything here in one way: sides interleaved, CPU time beside wall time, medians and spread over repeats.

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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from seedrl.config import BenchConfig

CPUCLOCK_SCHED = 2  # as clock_getcpuclockid(3) makes the clock of a process from its id
Side = TypeVar("Side", bound=Hashable)
Result = TypeVar("Result")


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
    """A headline: the median over repeats, its spread, and the bound it has to meet. `at_most`: less is better."""

    name: str
    values: list[float]
    bound: float | None = None
    at_most: bool = True
    wall: list[float] = field(default_factory=list)  # the same from wall time, if `values` are from CPU time

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
    """The results of a stage."""

    stage: str
    ratios: list[Ratio] = field(default_factory=list)
    table: list[dict[str, Any]] = field(default_factory=list)  # one row per configuration measured
    notes: list[str] = field(default_factory=list)
    detail: dict[str, Any] = field(default_factory=dict)  # what plots need beyond the table
    machine: dict[str, Any] = field(default_factory=lambda: fingerprint())  # as it was before the stage
    seconds: float = 0.0  # the stage took

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
                ratio.name: {"bound": ratio.bound, "at_most": ratio.at_most, "met": ratio.met} for ratio in self.ratios
            },
            "wall": {
                ratio.name: {"ratio": statistics.median(ratio.wall), "repeats": ratio.wall}
                for ratio in self.ratios
                if ratio.wall
            },
            "table": self.table,
            "notes": self.notes,
            "detail": self.detail,
            "seconds": self.seconds,
            "fingerprint": self.machine,
        }


def interleave(sides: Mapping[Side, Callable[[], Result]], repeats: int) -> dict[Side, list[Result]]:
    """Every side once per repeat, in turns; the order alternates so that neither side always goes first."""
    turns: dict[Side, list[Result]] = {name: [] for name in sides}
    for repeat in range(repeats):
        names = list(sides) if repeat % 2 == 0 else list(sides)[::-1]
        for name in names:
            turns[name].append(sides[name]())
    return turns


def paired(turns: dict[str, list[Turn]], above: str, below: str, measure: Callable[[Turn], float]) -> list[float]:
    """The ratio of two sides, repeat by repeat."""
    return [measure(a) / measure(b) for a, b in zip(turns[above], turns[below], strict=True)]


def cost_ratio(name: str, turns: dict[str, list[Turn]], above: str, below: str, bound: float | None = None) -> Ratio:
    """Time per unit of work, one side over the other: less is better."""
    return Ratio(
        name,
        paired(turns, above, below, lambda turn: turn.cpu_us),
        bound,
        True,
        paired(turns, below, above, per_second),
    )


def work_ratio(name: str, turns: dict[str, list[Turn]], above: str, below: str, bound: float | None = None) -> Ratio:
    """Work per unit of time, one side over the other: more is better."""
    return Ratio(name, paired(turns, above, below, per_cpu), bound, False, paired(turns, above, below, per_second))


def against_floor(
    report: Report,
    config: BenchConfig,
    works: dict[str, Callable[[], int]],  # ours first, then the floor
    name: str,
    row: dict[str, Any],
    unit: str,
    bound: float | None = None,
) -> None:
    """Our work and the floor it cannot beat, in turns: a row for each side, and their ratio."""
    turns = interleave(for_a_while(works, config.seconds), config.repeats)
    for side, measured in turns.items():
        cpu, wall = median(measured, per_cpu), median(measured, per_second)
        report.add({"side": side, **row, f"{unit} per CPU-second": cpu, f"{unit} per second": wall})
    ours, floor = works
    report.add_ratio(work_ratio(name, turns, ours, floor, bound))


def per_cpu(turn: Turn) -> float:
    return turn.per_cpu


def per_second(turn: Turn) -> float:
    return turn.rate


def median(turns: Sequence[Turn], measure: Callable[[Turn], float]) -> float:
    return statistics.median(measure(turn) for turn in turns)


def for_a_while(works: Mapping[Side, Callable[[], int]], seconds: float) -> dict[Side, Callable[[], Turn]]:
    """Sides for `interleave` from works of this process."""
    return {name: partial(run_for, seconds, work) for name, work in works.items()}


def run_for(seconds: float, work: Callable[[], int]) -> Turn:
    """Repeat `work`, which returns how much it did, for `seconds` and until it did something; CPU is this process's."""
    count, began, cpu = 0, time.perf_counter(), time.process_time()
    while not count or time.perf_counter() - began < seconds:
        count += work()
    return Turn(count, time.perf_counter() - began, time.process_time() - cpu)


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time of these processes so far, to the nanosecond: /proc counts ticks, which sample badly."""
    return sum(time.clock_gettime(~pid << 3 | CPUCLOCK_SCHED) for pid in pids)


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
    """One stage's JSON, or all of a suite's under `stages` with the ratios of all on top.

    A suite that is there keeps its other stages, each with when and where it was measured.
    """
    new = {document["stage"]: document for document in (report.as_json() for report in reports)}
    documents = list((_suite(path) | new).values())
    document = documents[0]
    if len(documents) > 1:
        document = {
            "ratios": {name: value for each in documents for name, value in each["ratios"].items()},
            "stages": documents,
            "fingerprint": documents[0]["fingerprint"],
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def _suite(path: Path) -> dict[str, dict[str, Any]]:
    """The stages of a suite in that file, by name; none if it holds something else."""
    if not path.exists():
        return {}
    return {stage["stage"]: stage for stage in json.loads(path.read_text()).get("stages", [])}


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
