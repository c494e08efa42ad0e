"""The learner of a job on this machine over its restarts: its command, its exit code, and whether it is restarted.

With launch=torchrun the process is torchrun, and the ranks are its children. Knows nothing of how actors are run.
"""

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from seedrl.config import Engine, RunConfig
from seedrl.errors import ConfigError
from seedrl.launching.children import FATAL_CODES, REQUESTED, Child, Crashes, Process, signal_of, start_module
from seedrl.launching.environment import variables
from seedrl.launching.overrides import override
from seedrl.launching.process_notes import ProcessNotes
from seedrl.launching.torchrun import failed_codes, failed_codes_of_newest_attempt
from seedrl.run.context import LEARNER, Context, Member, State
from seedrl.wire.address import address_of_rank, refuse_if_taken

SLOWEST_RESTART = 30.0  # longest seconds from a crash to the next start
SHOWN = 4  # members named in a message
ATTEMPTS = 100  # at finding ports
CLEAN_ENDS = (State.DONE, State.INTERRUPTED)


class LearnerProcess:
    """The learner, which is restarted at the same address and resumes from its newest checkpoint after a crash.

    Owned by the supervisor.
    """

    def __init__(
        self, config: RunConfig, overrides: Sequence[str], run_directory: Path, private: Path, notes: ProcessNotes
    ) -> None:
        self._config = config
        self._overrides = overrides
        self._run_directory = run_directory
        self._notes = notes
        self._listen = _with_a_port(config.listen, config.ranks.count)
        self.address = f"unix:{private}/learner.sock"  # of the actors started here; others may use listen
        self._has_torchrun = config.launch.engine is Engine.torchrun
        self._error_files = private / "torchrun"
        self._fatal_code: int | None = None  # the exit code of a rank that torchrun must not restart
        self._crashes = Crashes(config.max_restarts, SLOWEST_RESTART)
        self.child = Child(LEARNER, self._start)

    def _start(self) -> Process:
        where = {"run_dir": str(self._run_directory), "listen": self._listen, "socket": self.address}
        settings = [override(key, value) for key, value in where.items()]
        command = ["seedrl", "learner"]
        if self._has_torchrun:
            command = ["seedrl.launching.torchrun", f"{self._config.ranks.count}", f"{self._config.max_restarts}"]
            command.append(str(self._error_files))
        environment = variables(self._config.launch, self._config.launch.learner)
        process = start_module(*command, *self._overrides, *settings, env=environment)
        self._notes.learner_started(process.pid)
        return process

    # The learner has ended.

    def ended(self, is_stopping: bool) -> int | None:
        """Return the learner's exit code if it has ended. torchrun's own code does not tell how its ranks ended."""
        code = self.child.ended()
        if not self._has_torchrun:
            return code
        if code is None:
            self._stop_if_fatal()
        elif self._fatal_code is not None:
            return self._fatal_code
        elif is_stopping and self._notes.read().state in CLEAN_ENDS:  # those of rank 0
            return min(failed_codes_of_newest_attempt(self._error_files), default=0)
        return code

    def _stop_if_fatal(self) -> None:
        hopeless = failed_codes(self._error_files) & FATAL_CODES.keys()
        if hopeless and self._fatal_code is None and self.child.process is not None:
            self._fatal_code = min(hopeless)
            self.child.process.terminate()

    def schedule_restart(self, code: int, is_stopping: bool) -> bool:
        """Schedule a restart of a learner that has ended, if it is worth one; return whether it is.

        If it is not, the learner or this method reports why.
        """
        if code == 0:
            return False
        context = self._notes.read()
        words = self._reason_of_the_end(code, context)
        self._notes.note_end(self.child, code, words)
        is_wish = code in REQUESTED or (is_stopping and bool(signal_of(code)))
        if is_wish:
            self._notes.set_state(State.INTERRUPTED, f"Interrupted: {words} at once, without a last checkpoint")
        else:
            self._notes.set_state(State.FAILED, words)
        if is_stopping or is_wish or code in FATAL_CODES or not self._may_recover(code, context):
            return False
        if self._has_torchrun and code > 0:  # it was not killed, and has restarted its ranks as often as it may
            print(f"seedrl run: torchrun gave up ({words}) after as many restarts as allowed", file=sys.stderr)
            return False
        self._crashes.add()
        if self._crashes.are_too_many:
            reason = f"the learner {self._crashes.summary}, more often than max_restarts allows; last: {words}"
            self._notes.set_state(State.FAILED, reason)
            print(f"seedrl run: {reason}", file=sys.stderr)
            return False
        self._notes.set_state(State.INIT, f"restarting the learner: {words}")
        print(f"learner ended with code {code} ({words}); {_waiting(context)}; restarting it", file=sys.stderr)
        self.child.start_in(self._crashes.back_off)
        return True

    def _may_recover(self, code: int, context: Context) -> bool:
        """Return whether it was killed or has trained before; a learner that fails at its start would fail again."""
        return bool(signal_of(code)) or (self._notes.is_ours(context) and context.has_progressed)

    def _reason_of_the_end(self, code: int, context: Context) -> str:
        if name := signal_of(code):
            return f"ended by {name}"
        is_reported = self._notes.is_ours(context) and context.state is State.FAILED
        return context.reason if is_reported else "it left no reason"


def _waiting(context: Context) -> str:
    """Return in words which processes wait for the learner."""
    others: list[Member] = context.affected(LEARNER)[1:]
    names = [str(member) for member in others[:SHOWN]]
    more = [f"{len(others) - SHOWN} more"] if len(others) > SHOWN else []
    return f"{', '.join([*names, *more])} wait for it" if others else "no actor streamed to it"


def _with_a_port(listen: str, ranks: int = 1) -> str:
    """Replace port 0 by a free one, which stays the same over restarts; further ranks take the ports that follow."""
    host, _, port = listen.rpartition(":")
    if port != "0":
        return listen
    for _ in range(ATTEMPTS):
        with socket.create_server((host.strip("[]"), 0)) as probe:
            first = f"{host}:{probe.getsockname()[1]}"
        if all(_is_free(address_of_rank(first, rank)) for rank in range(1, ranks)):
            return first
    raise ConfigError(f"listen={listen}: no {ranks} consecutive ports are free; name the first of some that are")


def _is_free(address: str) -> bool:
    try:
        refuse_if_taken(address)
    except ConfigError:
        return False
    return True
