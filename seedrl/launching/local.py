"""`seedrl run`: a learner and its actors as supervised child processes on this machine. Knows nothing of torch.

What is special about the learner is in `learner_process.py`, about actors in `actors.py`.
"""

import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from seedrl.config import Engine, RunConfig
from seedrl.errors import SeedrlError
from seedrl.launching.actors import ActorFleet
from seedrl.launching.children import GOODBYE_SECONDS, STOP_SECONDS, Child
from seedrl.launching.learner_process import LearnerProcess
from seedrl.launching.outcome import errors_explained, exit_job
from seedrl.launching.process_notes import ProcessNotes
from seedrl.run.context import ContextFile, State
from seedrl.run.directory import RunDirectory, check_initial_weights
from seedrl.validation import check_job

POLL_SECONDS = 0.1


def run_locally(config: RunConfig, overrides: Sequence[str]) -> None:
    """Run a job; return when training is over. Exits after a signal, or with the learner's code if it failed."""
    check_job(config)
    check_initial_weights(config)
    run = RunDirectory.prepare(config)
    run.write_job(config)
    with tempfile.TemporaryDirectory(prefix="seedrl-") as private:
        supervisor = Supervisor(config, overrides, run, Path(private))
        with errors_explained(run, config):
            code = supervisor.run()
    exit_job(run, config, code, supervisor.is_stopping)


class Supervisor:
    """Starts the processes, restarts crashed ones, and ends with the learner. Owned by the main thread.

    The socket and the error files of the learner are in `private`, a directory that ends with the job.
    """

    def __init__(self, config: RunConfig, overrides: Sequence[str], run: RunDirectory, private: Path) -> None:
        self._notes = ProcessNotes(ContextFile(run.path), has_torchrun=config.launch.engine is Engine.torchrun)
        self._learner = LearnerProcess(config, overrides, run.path, private, self._notes)
        self._actors = ActorFleet(config, self._learner.address, run.logs, self._notes)
        self._signalled_at: float | None = None

    @property
    def is_stopping(self) -> bool:
        """Return whether a signal has asked the job to stop."""
        return self._signalled_at is not None

    def run(self) -> int:
        """Run until the learner ends for good; return its exit code."""
        self._forward_signals()
        try:
            self._learner.child.start()
            self._actors.start()
            return self._supervise()
        except SeedrlError as error:
            self._notes.set_state(State.FAILED, str(error))
            print("seedrl run: the run has failed and the learner is asked to stop; why follows", file=sys.stderr)
            raise
        finally:
            self._end_everything()

    def _supervise(self) -> int:
        while True:
            code = self._learner.ended(self.is_stopping)
            if code is not None and not self._learner.schedule_restart(code, self.is_stopping):
                return code
            if self.is_stopping and self._learner.child.is_due:
                return self._learner.child.exit_code or 0
            self._actors.schedule_restarts()
            self._actors.follow_demand(self.is_stopping)
            for child in self._children():
                if child.start_if_due():
                    self._notes.outdate()
            self._notes.write(self._children())
            self._enforce_the_end()
            time.sleep(POLL_SECONDS)

    def _children(self) -> Iterator[Child]:
        yield self._learner.child
        yield from self._actors

    def _forward_signals(self) -> None:
        """Pass signals on: the first asks the learner to stop cleanly, a second makes it end at once."""

        def forward(number: int, _: object) -> None:
            self._signalled_at = self._signalled_at or time.monotonic()
            self._learner.child.ask_to_end(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, forward)

    def _enforce_the_end(self) -> None:
        """Kill a learner that has not ended in time after a signal."""
        late = self._signalled_at is not None and time.monotonic() > self._signalled_at + STOP_SECONDS
        if late and self._learner.child.process is not None:
            self._learner.child.process.kill()

    def _end_everything(self) -> None:
        """Ask all processes to end, and kill those that do not."""
        deadline = time.monotonic() + GOODBYE_SECONDS
        for child in self._children():
            child.ask_to_end()
        for child in self._children():
            child.end(deadline)
        self._notes.outdate()
        self._notes.write(self._children())
