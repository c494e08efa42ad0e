"""`seedrl run` on a disk that becomes full: it continues, survives its learner, and never calls a loss a success."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from seedrl.run.context import LEARNER, Context, ContextFile, State
from tests.integration.processes import Commands, Process, saved_steps, summary_of
from tests.integration.support import fill
from tests.integration.waiting import eventually

pytestmark = pytest.mark.long

SETTINGS = (
    *("actors.envs=16", "algorithm.batch_size=8", "algorithm.unroll_length=10", "threads=1", "metrics="),
    *("stop.return_mean_100=null", "stop.env_steps=1_000_000_000", "checkpoint.seconds=0.1", "checkpoint.keep=1"),
)


class Crowded:
    """`seedrl run` in a directory on a disk that has become full after its first checkpoint."""

    def __init__(self, commands: Commands, disk: Path) -> None:
        self.directory = disk / "run"
        self.process: Process = commands.start("run", f"run_dir={self.directory}", *SETTINGS)
        self.soon(lambda: saved_steps(self.directory) and self.context.state is State.RUNNING)
        fill(disk / "ballast")
        self.soon(lambda: "no checkpoint could be written" in self.process.out)

    @property
    def context(self) -> Context:
        return ContextFile(self.directory).read_or_new()

    def soon(self, condition: Callable[[], Any]) -> None:
        eventually(lambda: condition() or not self.process.is_running)
        assert self.process.is_running, self.process.out + self.process.err

    def trains_on(self) -> None:
        """Wait until the context shows more updates, although there is no room for it."""
        before = self.context.counters["updates"]
        self.soon(lambda: self.context.state is State.RUNNING and self.context.counters["updates"] > before)


def test_run_that_is_stopped_on_a_full_disk_fails_in_words_and_leaves_a_true_summary_and_context(
    commands: Commands, small_disk: Path
) -> None:
    """It used to end with code 0 and "saved in …", an old summary, and a context that said RUNNING."""
    run = Crowded(commands, small_disk)
    run.trains_on()
    run.process.signal(signal.SIGTERM)
    assert run.process.wait() == 3
    saved = saved_steps(run.directory)
    last = run.process.err.splitlines()[-1]
    assert "Interrupted by SIGTERM, but the last checkpoint could not be written ([Errno 28] No space left" in last
    assert f"the newest is {saved:012d}" in last
    assert "saved in" not in run.process.out
    context, summary = run.context, summary_of(run.directory)
    assert context.state is State.FAILED
    assert "could not be written" in context.reason
    assert summary["status"] == "failed"
    assert summary["env_steps"] == context.counters["env_steps"] > saved


def test_run_whose_learner_dies_on_a_full_disk_resumes_and_saves_again_when_there_is_room(
    commands: Commands, small_disk: Path
) -> None:
    """The restart used to end with a traceback from the run directory, and the run with code 1 and not a word."""
    run = Crowded(commands, small_disk)
    first = run.context.members[LEARNER].pid
    os.kill(first, signal.SIGKILL)
    run.soon(lambda: run.context.members[LEARNER].pid != first and run.context.state is State.RUNNING)
    run.trains_on()
    saved = saved_steps(run.directory)
    assert f"resumed at {saved:,} steps" in run.process.out
    (small_disk / "ballast").unlink()
    run.soon(lambda: saved_steps(run.directory) > saved)
    run.process.signal(signal.SIGTERM)
    assert run.process.wait() == 0, run.process.err
    assert "Traceback" not in run.process.out + run.process.err
    assert summary_of(run.directory)["env_steps"] == saved_steps(run.directory)
    assert run.context.state is State.INTERRUPTED
