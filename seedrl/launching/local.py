"""`seedrl run`: a learner and its actors as supervised child processes on this machine. Knows nothing of torch.

With launch=torchrun the learner's process is torchrun, and the ranks are its children.
"""

import contextlib
import math
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from seedrl.config import Engine, LearnerConfig, RunConfig
from seedrl.errors import ConfigError, Refused, RunDirectoryError, SeedrlError
from seedrl.launching.children import Child, Crashes, Process, signal_of, start_module
from seedrl.launching.environment import variables
from seedrl.launching.overrides import override
from seedrl.launching.torchrun import failed_codes, failed_codes_of_newest_attempt
from seedrl.plugins import modules_of
from seedrl.run.context import LEARNER, Context, ContextFile, Member, State
from seedrl.run.directory import RunDirectory
from seedrl.sizes import serving_ranks
from seedrl.status import DRAINED
from seedrl.validation import check_job
from seedrl.wire.address import address_of_rank, refuse_if_taken

POLL_SECONDS = 0.1
FOLLOW_SECONDS = 1.0  # between two readings of how many actors the learner could use
GOODBYE_SECONDS = 20.0
STOP_SECONDS = 25.0  # from a signal until a learner that has not ended is killed
RETURN_SECONDS = 5.0  # until an actor that ended cleanly is started again, if the learner still runs
SLOWEST_ACTOR, SLOWEST_LEARNER = 5.0, 30.0  # longest seconds from a crash to the next start
SHOWN = 4  # members named in a message
ATTEMPTS = 100  # at finding ports
# Exit codes of a process that would fail again in the same way.
FATAL_CODES: dict[int, type[SeedrlError]] = {
    error.exit_code: error for error in (ConfigError, RunDirectoryError, Refused)
}
REQUESTED = {sign for number in (signal.SIGINT, signal.SIGTERM) for sign in (-number, 128 + number)}


class Supervisor:
    """Starts the processes, restarts crashed ones, and ends with the learner. Owned by the main thread.

    The crash of an actor affects no other process. A learner that crashes is restarted at the same address and resumes
    from its newest checkpoint; the actors wait for it and reconnect.
    """

    def __init__(self, config: RunConfig, overrides: Sequence[str]) -> None:
        check_job(config)
        self._config = config
        self._overrides = overrides
        self._run = RunDirectory.prepare(config)
        self._run.logs.mkdir(exist_ok=True)
        self._context = ContextFile(self._run.path)
        self._actor_crashes = Crashes(config.actors.max_restarts, SLOWEST_ACTOR)
        self._learner_crashes = Crashes(config.max_restarts, SLOWEST_LEARNER)
        self._listen = _with_a_port(config.listen, config.ranks.count)
        self._has_torchrun = config.launch.engine is Engine.torchrun
        self._fatal_code: int | None = None  # the exit code of a rank that torchrun must not restart
        self._learner = Child(LEARNER, self._start_learner)
        self._actors: dict[int, Child] = {}
        self._released: dict[int, float] = {}  # actors that are not needed any more, and when they must have ended
        self._followed = 0.0  # when the learner's demand for actors was last read
        self._learner_pids: set[int] = set()  # process ids of all learners started here
        self._state: tuple[State, str] | None = None  # the state of the run while no learner reports it
        self._is_noted = False
        self._signalled_at: float | None = None

    def run(self) -> None:
        """Run until training is over. Exits after a signal, or with the learner's code if it failed."""
        with tempfile.TemporaryDirectory(prefix="seedrl-") as private:
            self._address = f"unix:{private}/learner.sock"  # of the actors started here; others may use listen
            self._error_files = Path(private) / "torchrun"
            self._forward_signals()
            try:
                self._learner.start()
                for number in range(self._config.actors.count):
                    self._add_actor(number)
                code = self._supervise()
            except SeedrlError as error:
                self._state = (State.FAILED, str(error))
                raise
            finally:
                self._end_everything()
        if code or self._signalled_at:  # the latter ends a multirun, too
            raise SystemExit(code if code >= 0 else 128 - code)  # negative: ended by a signal

    def _supervise(self) -> int:
        """Run until the learner ends for good; return its exit code."""
        while True:
            code = self._learner_code()
            if code is not None and not self._is_worth_restarting(code):
                return code
            if self._signalled_at and self._learner.is_due:
                return self._learner.exit_code or 0
            for number, actor in self._actors.items():
                if (actor_code := actor.ended()) is not None:
                    self._consider_restart(number, actor, actor_code)
            self._follow_demand()
            for child in self._children():
                if child.start_if_due():
                    self._is_noted = False
            self._note()
            self._enforce_the_end()
            time.sleep(POLL_SECONDS)

    def _children(self) -> Iterator[Child]:
        yield self._learner
        yield from self._actors.values()

    # The learner has ended.

    def _learner_code(self) -> int | None:
        """Return the learner's exit code if it has ended. torchrun's own code does not tell how its ranks ended."""
        code = self._learner.ended()
        if not self._has_torchrun:
            return code
        if code is None:
            self._stop_if_fatal()
        elif self._fatal_code is not None:
            return self._fatal_code
        elif self._signalled_at and self._context.read_or_new().state is State.DONE:  # so rank 0 has ended cleanly
            return min(failed_codes_of_newest_attempt(self._error_files), default=0)
        return code

    def _stop_if_fatal(self) -> None:
        hopeless = failed_codes(self._error_files) & FATAL_CODES.keys()
        if hopeless and self._fatal_code is None and self._learner.process is not None:
            self._fatal_code = min(hopeless)
            self._learner.process.terminate()

    def _is_worth_restarting(self, code: int) -> bool:
        """Return whether a learner that has ended is started again. If not, it or this method reports why."""
        if code == 0:
            return False
        context = self._context.read_or_new()
        words = self._reason_of_the_end(code, context)
        self._note_end(self._learner, code, words)
        self._state = (State.FAILED, words)
        if self._signalled_at or code in REQUESTED or code in FATAL_CODES or not self._may_recover(code, context):
            return False
        if self._has_torchrun and code > 0:  # it was not killed, and has restarted its ranks as often as it may
            print(f"seedrl run: torchrun gave up ({words}) after as many restarts as allowed", file=sys.stderr)
            return False
        self._learner_crashes.add()
        if self._learner_crashes.are_too_many:
            reason = f"the learner {self._learner_crashes.summary}, more often than max_restarts allows; last: {words}"
            self._state = (State.FAILED, reason)
            print(f"seedrl run: {reason}", file=sys.stderr)
            return False
        self._state = (State.INIT, f"restarting the learner: {words}")
        seconds = self._learner_crashes.back_off
        print(f"learner ended with code {code} ({words}); {_waiting(context)}; restarting it", file=sys.stderr)
        self._learner.start_in(seconds)
        return True

    def _may_recover(self, code: int, context: Context) -> bool:
        """Return whether it was killed or has trained before; a learner that fails at its start would fail again."""
        return bool(signal_of(code)) or (self._is_ours(context) and context.has_progressed)

    def _reason_of_the_end(self, code: int, context: Context) -> str:
        if name := signal_of(code):
            return f"ended by {name}"
        is_reported = self._is_ours(context) and context.state is State.FAILED
        return context.reason if is_reported else "it left no reason"

    def _is_ours(self, context: Context) -> bool:
        """Return whether the newest learner has written this context."""
        learner = context.members.get(LEARNER)
        return learner is not None and self._learner.pid in (learner.pid, learner.parent)

    # An actor has ended.

    def _consider_restart(self, number: int, actor: Child, code: int) -> None:
        """Restart a crashed actor after a while; raise if it cannot work."""
        words = self._last_words(number)
        self._note_end(actor, code, words)
        if number in self._released:
            actor.start_in(math.inf)
            return
        if code == 0:  # it ends like this when training is over; if it is not, the learner runs on
            actor.start_in(math.inf if words.endswith(DRAINED) else RETURN_SECONDS)
            return
        if code in FATAL_CODES:
            raise FATAL_CODES[code](f"actor {number} cannot run: {words}")
        self._actor_crashes.add()
        if self._actor_crashes.are_too_many:
            raise SeedrlError(
                f"actors {self._actor_crashes.summary}, more often than actors.max_restarts allows; last: {words}"
            )
        affected = ", ".join(map(str, self._context.read_or_new().affected(actor.name))) or actor.name
        print(
            f"actor {number} ended with code {code} ({words}); this affects {affected}; restarting it",
            file=sys.stderr,
        )
        actor.start_in(self._actor_crashes.back_off)

    def _last_words(self, number: int) -> str:
        lines = self._log(number).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"

    # More actors, or fewer.

    def _add_actor(self, number: int) -> None:
        self._released.pop(number, None)
        if number not in self._actors:
            self._actors[number] = Child(f"actor-{number}", partial(self._start_actor, number))
        self._actors[number].start()
        self._is_noted = False

    def _follow_demand(self) -> None:
        """Start actors that the learner could use and end those it does not need, the newest first."""
        now, most = time.monotonic(), self._config.actors.at_most
        if not most or now < self._followed + FOLLOW_SECONDS:
            return
        self._followed = now
        for number in [number for number, deadline in self._released.items() if now > deadline]:
            self._actors[number].kill()
        wanted = self._wanted_actors()
        kept = sorted(self._actors.keys() - self._released.keys())
        leaving = {number for number in self._released if not self._actors[number].is_due}
        more = sorted(set(range(most)) - {*kept, *leaving})[: max(0, wanted - len(kept))]
        if more:
            print(f"the learner could use {wanted} actors: starting {_names(more)}", file=sys.stderr)
        for number in more:
            self._add_actor(number)
        if fewer := kept[wanted:]:
            print(f"the learner needs only {wanted} actors: ending {_names(fewer)}", file=sys.stderr)
        for number in fewer:
            self._release(number, now + GOODBYE_SECONDS)

    def _wanted_actors(self) -> int:
        """Return the number of actors to run; the present number while the learner reports no demand."""
        context = self._context.read_or_new()
        if self._signalled_at or context.state is not State.RUNNING or not self._is_ours(context):
            return len(self._actors.keys() - self._released.keys())
        return wanted_actors(self._config, context.desired_actors)

    def _release(self, number: int, deadline: float) -> None:
        self._released[number] = deadline
        actor = self._actors[number]
        if actor.is_due:  # it has crashed
            actor.start_in(math.inf)
        actor.ask_to_end()

    # The processes.

    def _start_learner(self) -> Process:
        where = {"run_dir": str(self._run.path), "listen": self._listen or self._address}
        if self._listen:
            where["socket"] = self._address
        settings = [override(key, value) for key, value in where.items()]
        command = ["seedrl", "learner"]
        if self._has_torchrun:
            command = ["seedrl.launching.torchrun", f"{self._config.ranks.count}", f"{self._config.max_restarts}"]
            command.append(str(self._error_files))
        environment = variables(self._config.launch, self._config.launch.learner)
        process = start_module(*command, *self._overrides, *settings, env=environment)
        self._learner_pids.add(process.pid)
        self._state = None
        return process

    def _start_actor(self, number: int) -> Process:
        """Start an actor; ranks get actors in turns."""
        address = address_of_rank(self._address, number % serving_ranks(self._config))
        environment = variables(self._config.launch, self._config.launch.actor)
        return start_actor(self._config, address, f"actor-{number}", self._log(number), environment)

    def _log(self, number: int) -> Path:
        return self._run.logs / f"actor-{number}.log"

    def _forward_signals(self) -> None:
        """Pass signals on: the first asks the learner to stop cleanly, a second makes it end at once."""

        def forward(number: int, _: object) -> None:
            self._signalled_at = self._signalled_at or time.monotonic()
            if self._learner.process is not None and self._learner.is_running:
                self._learner.process.terminate()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, forward)

    def _enforce_the_end(self) -> None:
        late = self._signalled_at is not None and time.monotonic() > self._signalled_at + STOP_SECONDS
        if late and self._learner.process is not None:
            self._learner.process.kill()

    def _end_everything(self) -> None:
        """Ask all processes to end, and kill those that do not."""
        deadline = time.monotonic() + GOODBYE_SECONDS
        for child in self._children():
            child.ask_to_end()
        for child in self._children():
            child.end(deadline)
        self._is_noted = False
        self._note()

    # The supervisor's part of the run context.

    def _note_end(self, child: Child, code: int, words: str) -> None:
        child.exit_code, child.last_words = code, words
        self._is_noted = False

    def _note(self) -> None:
        """Write how the processes are into the context, once a learner started here has claimed the run directory."""
        if self._is_noted:
            return
        learner = self._context.read_or_new().members.get(LEARNER)
        if learner is None or not {learner.pid, learner.parent} & self._learner_pids:
            return
        with contextlib.suppress(OSError), self._context.change() as context:
            for child in self._children():
                context.update(
                    child.name,
                    pid=learner.pid if child is self._learner and self._has_torchrun else child.pid,
                    restarts=child.starts - 1,
                    exit_code=child.exit_code,
                    last_words=child.last_words,
                )
            if self._state is not None:
                context.state, context.reason = self._state
            self._is_noted = True


def wanted_actors(config: RunConfig, desired: int) -> int:
    """Return the number of actors to run if each rank could use `desired`."""
    return min(max(desired * serving_ranks(config), config.actors.count), config.actors.at_most)


def start_actor(
    config: LearnerConfig, address: str, name: str, log: Path, environment: Mapping[str, str] | None = None
) -> Process:
    """Start an actor on this machine for the learner at this address; its output goes into the log."""
    settings = actor_settings(config, address, name)
    with log.open("ab") as out:
        return start_module("envs_server", *settings, stdout=out, stderr=out, env=environment)


def actor_settings(config: LearnerConfig, address: str, name: str) -> list[str]:
    """Return the settings that an actor is started with; the learner sends it the rest."""
    return [
        override("learner", address),
        override("name", name),
        override("threads", config.actors.threads),
        override("modules", modules_of(config.env.id, config.env.wrappers)),
        override("security.token_file", config.security.token_file),  # SEEDRL_TOKEN is inherited
    ]


def _names(actors: Sequence[int]) -> str:
    return ", ".join(f"actor-{number}" for number in actors)


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
