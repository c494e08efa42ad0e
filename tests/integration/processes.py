"""seedrl commands as real processes, with everything they start ended after the test."""

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
    """A command that was started; `out` and `err` are what it has printed so far."""

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
        """Its exit code. Fails if it does not end."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s; it said\n{self.out}\n{self.err}") from None

    def says(self, words: str) -> None:
        """Waits until it has printed these words."""
        eventually(lambda: words in self.out + self.err or not self.is_running)
        assert words in self.out + self.err, f"it ended and said\n{self.out}\n{self.err}"

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def children(self, module: str = "") -> dict[int, str]:
        """Living child processes and their command lines, of one module if it is given."""
        found = {}
        for pid in _children(self._process.pid):
            words = _command_line(pid)
            self._family.add(pid)
            if not module or module in words:
                found[pid] = " ".join(words)
        return found

    def left_behind(self) -> list[int]:
        """Which of the children seen so far are still there."""
        return [pid for pid in self._family if Path(f"/proc/{pid}").exists()]

    def end(self) -> None:
        """Ends it and its children whatever they are doing."""
        family = [*self.children(), *self._family]
        if self.is_running:
            self._process.kill()
            self._process.wait()
        for pid in family:
            if any(module in _command_line(pid) for module in ("seedrl", "envs_server")):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


class Commands:
    """Starts commands in a directory and ends what is left of them on `close`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._started: list[Process] = []

    def start(self, *arguments: str, module: str = "seedrl", path: Path | None = None, **environment: str) -> Process:
        """Starts `python -m module arguments…`; `path` is looked in first for modules."""
        if path is not None:
            environment["PYTHONPATH"] = str(path)
        command = [sys.executable, "-m", module, *arguments]
        self._started.append(Process(command, self.directory, len(self._started), environment))
        return self._started[-1]

    def run(self, *arguments: str, **options: Any) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command that ends by itself."""
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
    """Oldest first."""
    return sorted((run_dir / "checkpoints").glob("[0-9]*"))


def saved_steps(run_dir: Path) -> int:
    """Environment steps of the newest checkpoint."""
    found = checkpoints_of(run_dir)
    return int(found[-1].name.partition(".")[0]) if found else 0


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
