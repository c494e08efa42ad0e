"""The actors of a job on this machine: how one is started, when it is restarted, and how many run.

Knows nothing of the learner but its address and what it writes into the run context.
"""

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from seedrl.config import LearnerConfig, RunConfig
from seedrl.errors import EnvBroken, SeedrlError
from seedrl.launching.children import (
    FATAL_CODES,
    GOODBYE_SECONDS,
    RETURN_SECONDS,
    Child,
    Crashes,
    LastWords,
    Process,
    start_module,
)
from seedrl.launching.environment import variables
from seedrl.launching.overrides import override
from seedrl.launching.process_notes import ProcessNotes
from seedrl.plugins import modules_of
from seedrl.run.context import State
from seedrl.sizes import actor_count, serving_ranks
from seedrl.status import DRAINED
from seedrl.wire.address import address_of_rank

FOLLOW_SECONDS = 1.0  # between two readings of how many actors the learner could use
SLOWEST_RESTART = 5.0  # longest seconds from a crash to the next start


class ActorFleet:
    """The actors that a supervisor has started: restarts crashed ones and follows the learner's demand.

    The crash of an actor affects no other process. Owned by the supervisor.
    """

    def __init__(self, config: RunConfig, address: str, logs: Path, notes: ProcessNotes) -> None:
        self._config = config
        self._address = address  # the address of the first rank
        self._logs = logs
        self._logs.mkdir(exist_ok=True)
        self._notes = notes
        self._crashes = Crashes(config.actors.max_restarts, SLOWEST_RESTART)
        self._actors: dict[int, Child] = {}
        self._logged: dict[int, int] = {}  # the size of each log when its newest process was started
        self._released: dict[int, float] = {}  # actors that are not needed any more, and when they must have ended
        self._followed = 0.0  # when the learner's demand for actors was last read

    def __iter__(self) -> Iterator[Child]:
        return iter(self._actors.values())

    def start(self) -> None:
        """Start the actors that the job has from its beginning."""
        for number in range(actor_count(self._config)):
            self._add(number)

    def _add(self, number: int) -> None:
        self._released.pop(number, None)
        if number not in self._actors:
            self._actors[number] = Child(f"actor-{number}", partial(self._start_actor, number))
        self._actors[number].start()
        self._notes.outdate()

    def _start_actor(self, number: int) -> Process:
        """Start an actor; ranks get actors in turns."""
        address = address_of_rank(self._address, number % serving_ranks(self._config))
        environment = variables(self._config.launch, self._config.launch.actor)
        self._logged[number] = self._log(number).stat().st_size if self._log(number).exists() else 0
        return start_actor(self._config, address, f"actor-{number}", self._log(number), environment)

    def _log(self, number: int) -> Path:
        return self._logs / f"actor-{number}.log"

    # An actor has ended.

    def schedule_restarts(self) -> None:
        """Decide for every actor that has ended when it is restarted; raise if it cannot work."""
        for number, actor in self._actors.items():
            if (code := actor.ended()) is not None:
                self._consider_restart(number, actor, code)

    def _consider_restart(self, number: int, actor: Child, code: int) -> None:
        """Restart a crashed actor after a while; raise if it cannot work."""
        last = self._last_words(number)
        words = last.words
        self._notes.note_end(actor, code, words)
        if number in self._released:
            actor.start_in(math.inf)
            return
        if code == 0:  # it ends like this when training is over; if it is not, the learner runs on
            actor.start_in(math.inf if words.endswith(DRAINED) else RETURN_SECONDS)
            return
        if code in FATAL_CODES:
            raise last.failure(FATAL_CODES[code], f"actor {number} cannot run: {words}")
        context = self._notes.read()
        has_worked = self._notes.is_ours(context) and context.has_progressed
        if code == EnvBroken.exit_code and not has_worked:
            raise last.failure(EnvBroken, f"{last.reason} (actor {number}, {self._log(number)})")
        self._crashes.add()
        if self._crashes.are_too_many:
            often = f"actors {self._crashes.summary}, more often than actors.max_restarts allows"
            raise last.failure(SeedrlError, f"{often}; last: {words}")
        affected = ", ".join(map(str, context.affected(actor.name))) or actor.name
        print(
            f"actor {number} ended with code {code} ({words}); this affects {affected}; restarting it",
            *filter(None, [last.traceback]),
            sep="\n",
            file=sys.stderr,
        )
        actor.start_in(self._crashes.back_off)

    def _last_words(self, number: int) -> LastWords:
        """Return the last words of an actor's newest process."""
        with self._log(number).open(errors="replace") as log:
            log.seek(self._logged.get(number, 0))
            return LastWords.of(log.read())

    # More actors, or fewer.

    def follow_demand(self, is_stopping: bool) -> None:
        """Start actors that the learner could use and end those it does not need, the newest first."""
        now, most = time.monotonic(), self._config.actors.at_most
        if not most or now < self._followed + FOLLOW_SECONDS:
            return
        self._followed = now
        for number in [number for number, deadline in self._released.items() if now > deadline]:
            self._actors[number].kill()
        kept = sorted(self._actors.keys() - self._released.keys())
        wanted = len(kept) if is_stopping else self._wanted(len(kept))
        leaving = {number for number in self._released if not self._actors[number].is_due}
        more = sorted(set(range(most)) - {*kept, *leaving})[: max(0, wanted - len(kept))]
        if more:
            print(f"the learner could use {wanted} actors: starting {_names(more)}", file=sys.stderr)
        for number in more:
            self._add(number)
        if fewer := kept[wanted:]:
            print(f"the learner needs only {wanted} actors: ending {_names(fewer)}", file=sys.stderr)
        for number in fewer:
            self._release(number, now + GOODBYE_SECONDS)

    def _wanted(self, present: int) -> int:
        """Return the number of actors to run; the present number while the learner reports no demand."""
        context = self._notes.read()
        if context.state is not State.RUNNING or not self._notes.is_ours(context):
            return present
        return wanted_actors(self._config, context.desired_actors)

    def _release(self, number: int, deadline: float) -> None:
        self._released[number] = deadline
        actor = self._actors[number]
        if actor.is_due:  # it has crashed
            actor.start_in(math.inf)
        actor.ask_to_end()


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
