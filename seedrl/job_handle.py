"""A job that was submitted: where it is, how it is, its members, its outcome, and its end on request.

Knows nothing of settings.

The job runs in processes of its own and continues if the program that submitted it ends. What they print is in
`logs/job.log` of the run directory.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seedrl.config import ControlConfig
from seedrl.errors import JobFailed
from seedrl.monitoring.connection import ANSWER_SECONDS
from seedrl.monitoring.control import tell
from seedrl.monitoring.members import Gone, endpoints_of, serving
from seedrl.run.context import Context, ContextFile
from seedrl.status import ActorStatus
from seedrl.wire.channel import ask_status
from seedrl.wire.messages import MemberResult

LOG = "logs/job.log"
STARTING = "starting"  # the state of a job whose learner has not reported yet
FAILED = "failed"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The state of a job and its progress so far."""

    state: str  # starting, or a state of the run context: init, ready, running, draining, done, interrupted, failed
    reason: str = ""  # why it ended
    env_steps: int = 0
    updates: int = 0
    episodes: int = 0
    return_mean_100: float | None = None
    exit_code: int | None = None  # None while it runs


class SubmittedJob:
    """A job that runs, or is over. Owned by the thread that calls it."""

    def __init__(self, directory: Path, process: "subprocess.Popen[bytes]", written_before: float) -> None:
        """`written_before` is when the run context was written last by an earlier job."""
        self.directory = directory
        self._process = process
        self._written_before = written_before

    @classmethod
    def start(cls, directory: Path, overrides: Sequence[str]) -> "SubmittedJob":
        """Start `seedrl run` with these overrides, in a session of its own."""
        log = directory / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        written_before = ContextFile(directory).read_or_new().written
        with log.open("ab") as out:
            command = [sys.executable, "-m", "seedrl", "run", *overrides]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        return cls(directory, process, written_before)

    def status(self) -> JobStatus:
        """Return how the job is."""
        code = self._process.poll()
        context = ContextFile(self.directory).read_or_new()
        is_of_this_job = context.written != self._written_before
        if code and not is_of_this_job:  # it failed before there was a learner
            return JobStatus(FAILED, self._last_words(), exit_code=code)
        if not is_of_this_job:
            return JobStatus(STARTING, exit_code=code)
        return _status_of(context, self._newest_return(), code)

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Return the summary when the job is over, by itself or interrupted.

        Raise TimeoutError if it still runs after this many seconds, and JobFailed if it failed.
        """
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the job in {self.directory} still runs after {timeout:g} s") from None
        summary = self.summary
        if code or summary is None:
            raise JobFailed(f"the job in {self.directory} failed: {self._last_words()}; see {LOG} there", code)
        return summary

    @property
    def summary(self) -> dict[str, Any] | None:
        """Return summary.json, which is written at every clean end; None before the first one."""
        with contextlib.suppress(OSError, ValueError):
            content: dict[str, Any] = json.loads((self.directory / "summary.json").read_bytes())
            return content
        return None

    def stop(self, timeout: float | None = None) -> dict[str, Any]:
        """End the job cleanly, with a checkpoint, and return its summary; see `wait`."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self.wait(timeout)

    def members(self, actor: str = "", rank: int | None = None) -> dict[int, list[ActorStatus]]:
        """Return the actors that are connected, by rank: all, those of a rank, or the one with this name.

        Raises ConfigError for a rank or a name that there is not, and LearnerLost if no learner runs.
        """
        endpoints = endpoints_of(ControlConfig(run=str(self.directory), rank=rank))
        concerned = serving(actor, endpoints) if actor else endpoints
        if isinstance(concerned, Gone):
            return {}
        found = {each.rank: ask_status(each.link, ANSWER_SECONDS).actors for each in concerned}
        return {rank: [each for each in actors if actor in ("", each.name)] for rank, actors in found.items()}

    def control(self, *do: str, actor: str = "", rank: int | None = None, **settings: Any) -> list[MemberResult]:
        """Give the orders of `seedrl control` to one actor, to those of a rank, or to all; return a result for each.

        `settings` are temperature, epsilon and options. Raises as `members` does.
        """
        return tell(ControlConfig(do=list(do), actor=actor, rank=rank, run=str(self.directory), **settings))

    def _last_words(self) -> str:
        """Return the reason in the run context, or the last line that the job printed."""
        context = ContextFile(self.directory).read_or_new()
        if context.written != self._written_before and context.reason:
            return context.reason
        lines = (self.directory / LOG).read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "it printed nothing"

    def _newest_return(self) -> float | None:
        """Return the newest mean return of 100 episodes that was measured."""
        with contextlib.suppress(OSError, ValueError), (self.directory / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            row = json.loads(file.read().strip().splitlines()[-1])
            value = row.get("return_mean_100")
            return float(value) if isinstance(value, int | float) else None
        return None


TAIL = 1 << 16  # bytes that hold at least one line of metrics


def _status_of(context: Context, return_mean: float | None, code: int | None) -> JobStatus:
    counts = {name: context.counters.get(name, 0) for name in ("env_steps", "updates", "episodes")}
    state = context.state.name.lower()
    return JobStatus(state, context.reason, **counts, return_mean_100=return_mean, exit_code=code)
