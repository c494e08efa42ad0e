"""A job on a Ray cluster: `seedrl run launch=ray`. Placement, resources, restarts and variables are Ray's.

Each process of the job is the child of a Ray actor (`host.py`), and this is the driver: it reserves a placement group
(`bundles.py`), has Ray start a host for each process in it (`hosted.py`), and tells every host that arrives what to run
(`orders.py`). With actors.at_most their number follows what the learner could use (`growth.py`). A host that dies,
alone or with its machine, is restarted by Ray wherever the group has room then; a process that fails takes its host
with it, so that this, too, is Ray's to restart and to count. Knows nothing of torch.
"""

import math
import signal
import time
from collections.abc import Iterator, Sequence

import ray
from ray.exceptions import ActorDiedError, RayActorError
from ray.util.placement_group import PlacementGroup

from seedrl.config import RunConfig
from seedrl.errors import SeedrlError
from seedrl.launching.assignment import assign_ranks
from seedrl.launching.bundles import Layout, layout
from seedrl.launching.growth import Growth
from seedrl.launching.host import Arrival
from seedrl.launching.hosted import Hosted, News
from seedrl.launching.local import FATAL_CODES, GOODBYE_SECONDS, RETURN_SECONDS, STOP_SECONDS
from seedrl.launching.orders import RankPlace, actor_orders, identity_of, listening, refuse_exposure
from seedrl.launching.overrides import override
from seedrl.launching.placement import place
from seedrl.launching.raycluster import POLL_SECONDS, addresses, alive, as_node, connected, reserved, say, show
from seedrl.run.directory import RunDirectory
from seedrl.status import DRAINED
from seedrl.validation import check_job

KILLED = 128 + signal.SIGKILL


def run_on_ray(config: RunConfig, overrides: Sequence[str]) -> None:
    """Returns when training is over; exits after a signal, or with the learner's code if it failed."""
    check_job(config)
    with connected(config.launch.address):
        refuse_exposure(config, addresses())
        decided = layout(config, place(config, [as_node(node) for node in alive()]))
        job = RayJob(config, overrides, str(RunDirectory.prepare(config).path.resolve()))
        with reserved(decided, config.launch.name, lambda: job.is_interrupted) as group:
            code = job.run(decided, group)
    if code or job.is_interrupted:  # the latter ends a multirun, too
        raise SystemExit(code if code >= 0 else 128 - code)


class RayJob:
    """Starts what has arrived, awaits what is gone, ends with the learner. Owned by the main thread."""

    def __init__(self, config: RunConfig, overrides: Sequence[str], run_directory: str) -> None:
        self._config = config
        self._overrides = overrides
        self._run_directory = run_directory
        self._is_one_machine = len(addresses()) == 1
        self._ranks: list[Hosted] = []
        self._actors: list[Hosted] = []
        self._growth = Growth(config, run_directory, self._actors)
        self._endpoints: list[str] = []  # of the ranks that run and serve; none while they do not
        self._signals = self._obeyed = 0
        self._signalled_at = math.inf
        self._note_signals()

    @property
    def is_interrupted(self) -> bool:
        return self._signals > 0

    def run(self, decided: Layout, group: PlacementGroup) -> int:
        """Until the learner has ended for good; returns its code."""
        show(decided, group)
        self._create(decided, group)
        try:
            while (code := self._step()) is None:
                pass
            return code
        finally:
            self._end_everything()

    def _create(self, decided: Layout, group: PlacementGroup) -> None:
        """A host for each process, in its bundle."""
        for index, bundle in enumerate(decided.bundles):
            for where in bundle.places:
                hosted = Hosted(self._config, where, group, index, self._run_directory)
                (self._ranks if hosted.is_learner else self._actors).append(hosted)
        self._ranks.sort(key=lambda rank: rank.number)
        for hosted in self._all():
            hosted.summon()

    def _all(self) -> list[Hosted]:
        return [*self._ranks, *self._actors]

    def _step(self) -> int | None:
        """The learner's exit code, if the job is over."""
        for hosted, news in self._heard():
            match news:
                case int():
                    self._ended(hosted, news)
                case Arrival():
                    hosted.arrived(news)
                case RayActorError():
                    self._lost(hosted, news)
        self._obey_signals()
        if self._config.actors.at_most and self._endpoints and not self.is_interrupted:
            self._growth.follow(self._ranks[0])
        self._start_whoever_can()
        for hosted in self._all():
            hosted.tell_if_awaited()
        return self._final_code()

    # What hosts tell.

    def _heard(self) -> Iterator[tuple[Hosted, News]]:
        waiting = {hosted.pending: hosted for hosted in self._all() if hosted.pending is not None}
        if not waiting:
            time.sleep(POLL_SECONDS)
            return
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=POLL_SECONDS, fetch_local=False)
        for pending in ready:
            hosted = waiting[pending]
            for news in hosted.news(pending):
                if isinstance(news, str):
                    hosted.last_words = news
                    if hosted.is_learner:
                        print(news, flush=True)
                yield hosted, news

    def _lost(self, hosted: Hosted, error: RayActorError) -> None:
        """Its host is gone, or will never come."""
        if hosted.leaves_by < math.inf:
            self._growth.dismiss(hosted)
            return
        if isinstance(error, ActorDiedError):
            self._give_up(hosted, error)
            return
        say(f"{hosted.name} on {hosted.node} is gone; Ray restarts it")
        hosted.summon()
        if hosted.is_learner:
            self._restart_other_ranks(hosted)

    def _give_up(self, hosted: Hosted, error: ActorDiedError) -> None:
        """Ray has restarted it as often as it may, or could not start it at all."""
        words = hosted.last_words or str(error).strip().splitlines()[-1].strip()
        if not hosted.node:
            raise SeedrlError(f"{hosted.name} cannot run on Ray; is seedrl installed on every node? Ray says: {words}")
        setting = "max_restarts" if hosted.is_learner else "actors.max_restarts"
        message = f"{hosted.name} has been restarted as often as {setting} allows; last: {words}"
        if hosted.is_learner:
            raise _Ended(message, hosted.exit_code or 1)
        say(message)
        self._growth.give_up(hosted)
        if not self._actors:
            raise SeedrlError(f"no actor is left; last: {message}")

    def _ended(self, hosted: Hosted, code: int) -> None:
        """Its process has; its host is there."""
        hosted.is_running, hosted.exit_code = False, code
        if hosted.is_learner:
            self._rank_ended(hosted, code)
        else:
            self._actor_ended(hosted, code)

    def _rank_ended(self, rank: Hosted, code: int) -> None:
        rank.is_over = code == 0 or code in FATAL_CODES or self.is_interrupted
        if not rank.is_over:
            self._restart_failed(rank)
            self._restart_other_ranks(rank)

    def _restart_other_ranks(self, first: Hosted) -> None:
        """None of them can go on alone."""
        self._endpoints = []
        for rank in self._ranks:
            rank.is_over = False
            if rank is not first and rank.arrival is not None:
                rank.restart()

    def _actor_ended(self, actor: Hosted, code: int) -> None:
        if actor.leaves_by < math.inf:
            self._growth.dismiss(actor)
        elif actor.is_moving:
            actor.is_moving = False
        elif code in FATAL_CODES:
            raise FATAL_CODES[code](f"{actor.name} cannot run: {actor.last_words}")
        elif code == 0 or not self._endpoints:  # told that training is over, or there is no learner
            actor.is_over = actor.last_words.endswith(DRAINED)
            actor.due = time.monotonic() + RETURN_SECONDS
        else:
            self._restart_failed(actor)

    def _restart_failed(self, hosted: Hosted) -> None:
        say(f"{hosted.name} on {hosted.node} ended with code {hosted.exit_code} ({hosted.last_words}); Ray restarts it")
        hosted.restart()

    # What hosts are told.

    def _start_whoever_can(self) -> None:
        if self.is_interrupted:
            return
        if all(rank.can_start for rank in self._ranks):
            self._start_ranks()
        starting = [actor for actor in self._actors if actor.can_start] if self._endpoints else []
        endpoints = self._endpoints_of_actors(kept=self._actors) if starting else {}
        for actor in starting:
            actor.learner = endpoints[actor.number]
            actor.start("envs_server", actor_orders(self._config, actor.learner, actor.name), {})

    def _start_ranks(self) -> None:
        """All at once; an actor that has another address for its learner moves."""
        places = [RankPlace(rank.number, rank.node, rank.address, *rank.ports) for rank in self._ranks]
        listens = [listening(self._config, where, places, self._is_one_machine) for where in places]
        for rank, where, (settings, _) in zip(self._ranks, places, listens, strict=True):
            arguments = ["learner", *self._overrides, override("run_dir", self._run_directory), *settings]
            rank.start("seedrl", arguments, identity_of(self._config, where, places, self._is_one_machine))
        serving = 1 if self._config.ranks.separate else len(self._ranks)
        self._endpoints = [endpoint for _, endpoint in listens[:serving]]
        endpoints = self._endpoints_of_actors(kept=[])
        for actor in self._actors:
            if actor.is_running and actor.learner != endpoints[actor.number]:
                actor.is_moving = True
                actor.stop()

    def _endpoints_of_actors(self, kept: Sequence[Hosted]) -> dict[int, str]:
        """Return the address of each actor's rank; those in `kept` that run keep the one they have."""
        staying = [actor for actor in kept if actor.is_running and actor.learner in self._endpoints]
        assigned = assign_ranks(
            actors={actor.number: actor.node for actor in self._actors},
            ranks=[rank.node for rank in self._ranks[: len(self._endpoints)]],
            kept={actor.number: self._endpoints.index(actor.learner) for actor in staying},
        )
        return {number: self._endpoints[rank] for number, rank in assigned.items()}

    # The end.

    def _final_code(self) -> int | None:
        """Of the learner, once none of its ranks runs or is going to, or one would only fail again."""
        codes = [rank.exit_code for rank in self._ranks if rank.is_over and rank.exit_code]
        is_hopeless = any(code in FATAL_CODES for code in codes)
        are_over = all(rank.is_over or (self.is_interrupted and not rank.is_running) for rank in self._ranks)
        return (codes[0] if codes else 0) if are_over or is_hopeless else None

    def _note_signals(self) -> None:
        def note(number: int, _: object) -> None:
            self._signals += 1

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, note)

    def _obey_signals(self) -> None:
        """A signal asks the learner to stop in order; a second one makes it end at once."""
        if self._signals > self._obeyed:
            self._obeyed = self._signals
            self._signalled_at = min(self._signalled_at, time.monotonic())
            for rank in self._ranks:
                rank.stop()
        if time.monotonic() > self._signalled_at + STOP_SECONDS:
            raise _Ended("the learner did not end in time and was killed", KILLED)

    def _end_everything(self) -> None:
        """Whoever is still there is asked to end; what does not is killed with its host."""
        deadline = time.monotonic() + GOODBYE_SECONDS
        for hosted in self._all():
            hosted.stop()
        while any(hosted.is_running for hosted in self._all()) and time.monotonic() < deadline:
            for hosted, news in self._heard():
                if isinstance(news, int | RayActorError):
                    hosted.is_running = False
        self._growth.end()


class _Ended(SeedrlError):
    """The learner has, for good."""

    def __init__(self, words: str, code: int) -> None:
        super().__init__(words)
        self.exit_code = code if code >= 0 else 128 - code
