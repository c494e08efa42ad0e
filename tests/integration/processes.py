"""seedrl commands as real processes; everything that they start is ended after the test."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.waiting import DEADLINE, eventually


class Process:
    """A command that was started; `out` and `err` hold what it has printed so far."""

    def __init__(self, command: list[str], directory: Path, number: int, environment: dict[str, str]) -> None:
        self._out, self._err = directory / f"out-{number}.txt", directory / f"err-{number}.txt"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                command, cwd=directory, env={**os.environ, **environment}, stdout=out, stderr=err
            )
        self._family: set[int] = set()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float = DEADLINE) -> int:
        """Return its exit code; fail if it does not end."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s; it said\n{self.out}\n{self.err}") from None

    def says(self, words: str) -> None:
        """Wait until it has printed these words."""
        eventually(lambda: words in self.out + self.err or not self.is_running)
        assert words in self.out + self.err, f"it ended and said\n{self.out}\n{self.err}"

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def children(self, module: str = "") -> dict[int, str]:
        """Return living child processes and their command lines, only those of one module if it is given."""
        found = {}
        for pid in _children(self._process.pid):
            words = _command_line(pid)
            self._family.add(pid)
            if not module or module in words:
                found[pid] = " ".join(words)
        return found

    def left_behind(self) -> list[int]:
        """Return which of the children seen so far still exist."""
        return [pid for pid in self._family if Path(f"/proc/{pid}").exists()]

    def end(self) -> None:
        """End it and every process below it, whatever they are doing, and wait until they are gone."""
        family = {pid for pid in self._family if _is_ours(pid)}
        if self.is_running:
            family |= _below(self.pid)
            self._process.kill()
        self._process.wait()
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))


class Commands:
    """Starts commands in a directory and ends those that still run on `close`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._started: list[Process] = []

    def start(self, *arguments: str, module: str = "seedrl", path: Path | None = None, **environment: str) -> Process:
        """Start `python -m module arguments…`; modules are looked for in `path` first."""
        if path is not None:
            environment["PYTHONPATH"] = str(path)
        command = [sys.executable, "-m", module, *arguments]
        self._started.append(Process(command, self.directory, len(self._started), environment))
        return self._started[-1]

    def run(self, *arguments: str, **options: Any) -> tuple[int, str, str]:
        """Run a command that ends by itself; return its exit code, stdout and stderr."""
        process = self.start(*arguments, **options)
        code = process.wait()
        return code, process.out, process.err

    def close(self) -> None:
        for process in self._started:
            process.end()


def summary_of(run_dir: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


def checkpoints_of(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    return sorted((run_dir / "checkpoints").glob("[0-9]*"))


def saved_steps(run_dir: Path) -> int:
    """Return the environment steps of the newest checkpoint; 0 if there is none."""
    found = checkpoints_of(run_dir)
    return int(found[-1].name.partition(".")[0]) if found else 0


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _below(pid: int) -> set[int]:
    """Return the children of a process, their children, and so on."""
    children = _children(pid)
    return {*children, *(each for child in children for each in _below(child))}


def _is_ours(pid: int) -> bool:
    """Return whether a process that was seen before is still the same, and not a new one with its number."""
    return any(module in _command_line(pid) for module in ("seedrl", "envs_server"))


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
