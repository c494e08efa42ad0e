"""`seedrl run -m`: many runs on this machine, some of them at a time, each on cores of its own.

A run that fails ends no other. The directory of the sweep has a directory and a log for each run, `sweep.csv` and, at
the end, a plot. Knows nothing of how a run trains, nor of which values are worth trying (`search.py`).
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from seedrl.commandline.members import Member, Status, read_table, table, write_table
from seedrl.commandline.population import JOURNAL
from seedrl.commandline.search import Search
from seedrl.config import SweepConfig
from seedrl.errors import ConfigError, SeedrlError, require
from seedrl.launching.children import GOODBYE_SECONDS, STOP_SECONDS, Child, LastWords, Process, start_module
from seedrl.launching.overrides import override
from seedrl.monitoring.compare import draw_runs
from seedrl.monitoring.lineage import draw_lineage
from seedrl.run.directory import fresh, write_atomically
from seedrl.sizes import available_cores

POLL_SECONDS = 0.1
PLOT = "compare.png"
LINEAGE = "lineage.png"
SETTINGS = "settings.txt"  # the overrides that all runs of a sweep share
SOME_FAILED = 1  # the exit code
CAN_PIN = hasattr(os, "sched_setaffinity")  # Linux


def sweep_directory(config: SweepConfig) -> Path:
    """Return the directory of a sweep, which exists afterwards."""
    if not config.dir:
        return fresh(Path("runs") / "sweeps")
    directory = Path(config.dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"sweep.dir={directory} cannot be created: {error.strerror}") from error
    return directory


def refuse_other_settings(directory: Path, fixed: Sequence[str]) -> None:
    """Note the settings that all runs share, and refuse a sweep that has others: its finished runs would not fit."""
    note = directory / SETTINGS
    now = "".join(f"{override}\n" for override in fixed)
    before = note.read_text() if note.exists() else now
    if before != now:
        settings = " ".join(before.split("\n")).strip() or "no settings"
        raise ConfigError(f"{directory} holds a sweep with {settings}; give the same, or another sweep.dir")
    write_atomically(note, now)


def places(config: SweepConfig) -> list[set[int]]:
    """Return the cores of each place for a run: equal shares of those that the sweep may use."""
    available = sorted(os.sched_getaffinity(0)) if CAN_PIN else list(range(available_cores()))
    cores = available[: config.cores or None]
    require(config.parallel >= 1, f"sweep.parallel={config.parallel} must be at least 1")
    require(
        0 <= config.cores <= len(available),
        f"sweep.cores={config.cores} is more than the {len(available)} that this process may use",
    )
    require(
        config.parallel <= len(cores),
        f"sweep.parallel={config.parallel} runs need as many cores, and there are {len(cores)}",
    )
    share = len(cores) // config.parallel
    return [set(cores[place * share : (place + 1) * share]) for place in range(config.parallel)]


class Sweep:
    """The runs of a sweep from the first to the last. Owned by the main thread."""

    def __init__(
        self,
        directory: Path,
        places: Sequence[set[int]],
        fixed: Sequence[str],
        search: Search,
        check: Callable[[Sequence[str]], None],
    ) -> None:
        self._directory = directory
        self._fixed = list(fixed)  # the overrides that all runs have
        self._search = search
        self._check = check  # raises for a run that could not start
        self._free = list(places)  # the cores of each
        self._members = read_table(directory)
        refuse_other_settings(directory, self._fixed)
        self._running: dict[int, tuple[Child, set[int]]] = {}
        self._signals: list[int] = []

    def run(self) -> int:
        """Run everything; return the exit code."""
        count, at_once = self._search.count, len(self._free)
        cores = len(self._free[0])
        each = f"{cores} core{'' if cores == 1 else 's'}"
        print(f"sweep: {count} runs in {self._directory}, {at_once} at a time on {each}", flush=True)
        with self._handled_signals():
            try:
                while self._start_some() or self._running:
                    self._end_some()
                    time.sleep(POLL_SECONDS)
            finally:
                self._end_all()
        self._conclude()
        if self._signals:
            return 128 + self._signals[0]
        return SOME_FAILED if any(each.status is Status.FAILED for each in self._members.values()) else 0

    def _start_some(self) -> bool:
        """Start runs while there are places; return whether one was started."""
        started = False
        while self._free and not self._signals and (asked := self._search.ask()) is not None:
            started = self._begin(*asked) or started
        return started

    def _begin(self, number: int, overrides: list[str]) -> bool:
        """Start a run unless it is done already or cannot start; return whether it was started."""
        before = self._members.get(number)
        if before is not None and before.overrides != overrides:
            raise ConfigError(
                f"{self._directory} holds a sweep with other values: its run {number} has "
                f"{' '.join(before.overrides)}, not {' '.join(overrides)}; give another sweep.dir"
            )
        if before is not None and before.status is Status.DONE:
            return False
        member = self._members[number] = Member(number, overrides, self._directory / str(number))
        words = [*self._fixed, *overrides, override("run_dir", str(member.directory))]
        try:
            self._check(words)
        except SeedrlError as error:
            self._note_end(member, Status.FAILED, str(error))
            return False
        cores = self._free.pop()
        child = Child(member.name, lambda: self._process(words, self._log(member), cores))
        child.start()
        self._running[number] = child, cores
        print(f"sweep: {member.name} started, log {self._log(member)}", flush=True)
        write_table(self._directory, self._in_order())
        return True

    def _process(self, words: Sequence[str], log: Path, cores: set[int]) -> Process:
        """Start a run on some cores, which its own processes inherit."""
        with _pinned(cores), log.open("ab") as out:
            return start_module("seedrl", "run", *words, stdout=out, stderr=out)

    def _log(self, member: Member) -> Path:
        return self._directory / f"{member.number}.log"

    # A run has ended.

    def _end_some(self) -> None:
        for number, (child, cores) in list(self._running.items()):
            if (code := child.ended()) is not None:
                del self._running[number]
                self._free.append(cores)
                self._conclude_run(self._members[number], code)

    def _conclude_run(self, member: Member, code: int) -> None:
        if code == 0 and not member.was_interrupted:  # a run that is asked to stop ends well
            self._note_end(member, Status.DONE)
        elif self._signals or code == 0:
            self._note_end(member, Status.INTERRUPTED)
        else:
            last = LastWords.of(self._log(member).read_text(errors="replace"))
            self._note_end(member, Status.FAILED, f"{last.words} (code {code})")

    def _note_end(self, member: Member, status: Status, reason: str = "") -> None:
        member.end(status, reason)
        self._search.tell(member.number, member.score)
        score = "no episode finished" if member.best_return is None else f"best return {member.best_return:,.2f}"
        how = reason or f"{score}, {member.env_steps:,} steps"
        print(f"sweep: {member.name} {status}: {how}", flush=True)
        write_table(self._directory, self._in_order())

    def _in_order(self) -> list[Member]:
        return [member for _, member in sorted(self._members.items())]

    # The end.

    @contextmanager
    def _handled_signals(self) -> Iterator[None]:
        """Let the first signal end the runs cleanly, and a second one at once."""
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def handle(number: int, _: object) -> None:
            self._signals.append(number)
            for child, _cores in self._running.values():
                child.ask_to_end() if len(self._signals) == 1 else child.kill()

        for number in before:
            signal.signal(number, handle)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_all(self) -> None:
        """End the runs that are left if the sweep itself has failed."""
        for child, _ in self._running.values():
            child.ask_to_end()
        for child, _ in self._running.values():
            child.end(time.monotonic() + STOP_SECONDS + GOODBYE_SECONDS)

    def _conclude(self) -> None:
        """Print the table and draw the plot."""
        members = self._in_order()
        print(table(members))
        try:
            draw_runs(
                [member.directory for member in members if member.best_return is not None], self._directory / PLOT
            )
            if (journal := self._directory / JOURNAL).exists():
                draw_lineage(journal, self._directory / LINEAGE)
                print(f"sweep: {journal} says why each member did what; {LINEAGE} shows it")
        except SeedrlError as error:
            print(f"sweep: no plot: {error}")
        print(f"sweep: saved in {self._directory}; seedrl plot {self._directory} compares the runs again", flush=True)


@contextmanager
def _pinned(cores: set[int]) -> Iterator[None]:
    """Keep this process, and what it starts meanwhile, on these cores, where the system can do that."""
    before = os.sched_getaffinity(0) if CAN_PIN else set()
    if CAN_PIN:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        if CAN_PIN:
            os.sched_setaffinity(0, before)
