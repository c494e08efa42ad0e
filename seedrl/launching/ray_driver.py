"""A job on a Ray cluster: `seedrl run launch=ray`. Ray does the placement, the restarts and gives out resources.

Each process of the job is the child of a Ray actor, its host (`ray_host.py`). This is the driver. It reserves a
placement group (`ray_reservation.py`), lets Ray start a host for each process in it (`ray_host_handle.py`), and sends
every host that is ready the process to run (`ray_process.py`) with its settings (`process_settings.py`). With
actors.at_most their number follows the learner's demand (`ray_autoscaler.py`). A host that dies, alone or with its
machine, is restarted by Ray wherever the group has room then. A process that fails takes its host with it, so Ray
restarts and counts that as well. Knows nothing of torch.
"""

import math
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import ray
from ray.exceptions import ActorDiedError, RayActorError
from ray.util.placement_group import PlacementGroup

from seedrl.config import RunConfig
from seedrl.errors import EnvBroken, RunDirectoryError, SeedrlError
from seedrl.launching.assignment import assign_ranks
from seedrl.launching.children import FATAL_CODES, GOODBYE_SECONDS, RETURN_SECONDS, STOP_SECONDS
from seedrl.launching.outcome import errors_explained, exit_job
from seedrl.launching.overrides import override
from seedrl.launching.placement import place
from seedrl.launching.process_settings import (
    RankAddress,
    rank_settings,
    rank_variables,
    refuse_exposure,
    remote_actor_settings,
)
from seedrl.launching.ray_autoscaler import RayAutoscaler
from seedrl.launching.ray_cluster import POLL_SECONDS, addresses, alive, as_node, connected, reserved, say, show
from seedrl.launching.ray_host import HostReady
from seedrl.launching.ray_host_handle import HostHandle, News
from seedrl.launching.ray_process import RayProcess
from seedrl.launching.ray_reservation import Reservation, plan_reservation
from seedrl.run.context import ContextFile
from seedrl.run.directory import RunDirectory
from seedrl.status import DRAINED
from seedrl.validation import check_job

KILLED = 128 + signal.SIGKILL


def run_on_ray(config: RunConfig, overrides: Sequence[str]) -> None:
    """Run a job; return when training is over. Exits after a signal, or with the learner's code if it failed."""
    check_job(config)
    with connected(config.launch.address):
        refuse_exposure(config, addresses())
        reservation = plan_reservation(config, place(config, [as_node(node) for node in alive()]))
        run = RunDirectory.prepare(config)
        run.write_job(config)
        driver = RayDriver(config, overrides, str(run.path.resolve()))
        room = reserved(reservation, config.launch.name, lambda: driver.is_interrupted)
        with errors_explained(run, config), room as group:
            code = driver.run(reservation, group)
    exit_job(run, config, code, driver.is_interrupted)


class RayDriver:
    """Starts a process on every host that is ready and ends with the learner. Owned by the main thread."""

    def __init__(self, config: RunConfig, overrides: Sequence[str], run_directory: str) -> None:
        self._config = config
        self._overrides = overrides
        self._run_directory = run_directory
        self._is_one_machine = len(addresses()) == 1
        self._ranks: list[RayProcess] = []
        self._actors: list[RayProcess] = []
        self._autoscaler = RayAutoscaler(config, run_directory, self._actors)
        self._endpoints: list[str] = []  # of the ranks that run and serve; none while they do not
        self._signals = self._obeyed = 0
        self._newest_signal: int = signal.SIGTERM
        self._signalled_at = math.inf
        self._note_signals()

    @property
    def is_interrupted(self) -> bool:
        return self._signals > 0

    def run(self, reservation: Reservation, group: PlacementGroup) -> int:
        """Run until the learner has ended for good; return its exit code."""
        show(reservation, group)
        self._create(reservation, group)
        try:
            while (code := self._step()) is None:
                pass
            return code
        finally:
            self._end_everything()

    def _create(self, reservation: Reservation, group: PlacementGroup) -> None:
        """Ask Ray for a host for each process, in its bundle."""
        for index, bundle in enumerate(reservation.bundles):
            for where in bundle.places:
                host = HostHandle(self._config, where, group, index, self._run_directory)
                process = RayProcess(where, host)
                (self._ranks if process.is_learner else self._actors).append(process)
        self._ranks.sort(key=lambda rank: rank.number)
        for process in self._all():
            process.request_host()

    def _all(self) -> list[RayProcess]:
        return [*self._ranks, *self._actors]

    def _step(self) -> int | None:
        """Handle what hosts have sent; return the learner's exit code if the job is over."""
        for process, news in self._news():
            match news:
                case int():
                    self._ended(process, news)
                case HostReady():
                    process.host.take(news)
                case RayActorError():
                    self._lost(process, news)
        self._obey_signals()
        if self._config.actors.at_most and self._endpoints and not self.is_interrupted:
            self._autoscaler.follow_demand(self._ranks[0])
        self._start_what_can_start()
        for process in self._all():
            process.host.report_if_late()
        return self._final_code()

    # What hosts send.

    def _news(self) -> Iterator[tuple[RayProcess, News]]:
        waiting = {process.host.pending: process for process in self._all() if process.host.pending is not None}
        if not waiting:
            time.sleep(POLL_SECONDS)
            return
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=POLL_SECONDS, fetch_local=False)
        for pending in ready:
            process = waiting[pending]
            for news in process.host.news(pending):
                if isinstance(news, str):
                    process.note_line(news)
                    if process.is_learner:
                        print(news, flush=True)
                yield process, news

    def _lost(self, process: RayProcess, error: RayActorError) -> None:
        """Handle the loss of a process's host, or that Ray cannot start one."""
        if process.leaves_by < math.inf:
            self._autoscaler.remove(process)
            return
        if isinstance(error, ActorDiedError):
            self._give_up(process, error)
            return
        say(f"{process.name} on {process.host.node} is lost; Ray restarts it")
        process.request_host()
        if process.is_learner:
            self._restart_other_ranks(process)

    def _give_up(self, process: RayProcess, error: ActorDiedError) -> None:
        """Handle a process that Ray restarts no more, or could not start at all."""
        words = process.last_words or str(error).strip().splitlines()[-1].strip()
        if not process.host.node:
            raise SeedrlError(f"{process.name} cannot run on Ray; is seedrl on every node? Ray reports: {words}")
        setting = "max_restarts" if process.is_learner else "actors.max_restarts"
        message = f"{process.name} has been restarted as often as {setting} allows; last: {words}"
        if process.is_learner:
            raise _Ended(message, process.exit_code or 1)
        say(message)
        self._autoscaler.give_up(process)
        if not self._actors:
            raise SeedrlError(f"no actor is left; last: {message}")

    def _ended(self, process: RayProcess, code: int) -> None:
        """Handle the end of a process whose host is still there."""
        process.is_running, process.exit_code = False, code
        if process.is_learner:
            self._rank_ended(process, code)
        else:
            self._actor_ended(process, code)

    def _rank_ended(self, rank: RayProcess, code: int) -> None:
        rank.is_over = code == 0 or code in FATAL_CODES or self.is_interrupted
        if not rank.is_over:
            self._restart_failed(rank)
            self._restart_other_ranks(rank)

    def _restart_other_ranks(self, first: RayProcess) -> None:
        """Restart the other ranks, as none can train alone."""
        self._endpoints = []
        for rank in self._ranks:
            rank.is_over = False
            if rank is not first and rank.host.is_ready:
                rank.restart()

    def _actor_ended(self, actor: RayProcess, code: int) -> None:
        if actor.leaves_by < math.inf:
            self._autoscaler.remove(actor)
        elif actor.is_moving:
            actor.is_moving = False
        elif code in FATAL_CODES:
            raise FATAL_CODES[code](f"{actor.name} cannot run: {actor.last_words}")
        elif code == EnvBroken.exit_code and self._has_never_trained():
            raise EnvBroken(f"{actor.name} cannot run: {actor.last_words}")
        elif code == 0 or not self._endpoints:  # training is over, or there is no learner
            actor.is_over = actor.last_words.endswith(DRAINED)
            actor.due = time.monotonic() + RETURN_SECONDS
        else:
            self._restart_failed(actor)

    def _has_never_trained(self) -> bool:
        """Return whether the run context says so; it may lie where this machine cannot read it."""
        try:
            return not ContextFile(Path(self._run_directory)).read().has_progressed
        except RunDirectoryError:
            return False

    def _restart_failed(self, process: RayProcess) -> None:
        how = f"code {process.exit_code} ({process.last_words})"
        say(f"{process.name} on {process.host.node} ended with {how}; Ray restarts it")
        process.restart()

    # What hosts are sent.

    def _start_what_can_start(self) -> None:
        if self.is_interrupted:
            return
        if all(rank.can_start for rank in self._ranks):
            self._start_ranks()
        starting = [actor for actor in self._actors if actor.can_start] if self._endpoints else []
        endpoints = self._endpoints_of_actors(kept=self._actors) if starting else {}
        for actor in starting:
            actor.learner = endpoints[actor.number]
            actor.start("envs_server", remote_actor_settings(self._config, actor.learner, actor.name), {})

    def _start_ranks(self) -> None:
        """Start all ranks at once; actors whose rank has another address now are moved."""
        addresses = [_address_of(rank) for rank in self._ranks]
        listens = [rank_settings(self._config, each, addresses, self._is_one_machine) for each in addresses]
        for rank, address, (settings, _) in zip(self._ranks, addresses, listens, strict=True):
            arguments = ["learner", *self._overrides, override("run_dir", self._run_directory), *settings]
            rank.start("seedrl", arguments, rank_variables(self._config, address, addresses, self._is_one_machine))
        serving = 1 if self._config.ranks.separate else len(self._ranks)
        self._endpoints = [endpoint for _, endpoint in listens[:serving]]
        endpoints = self._endpoints_of_actors(kept=[])
        for actor in self._actors:
            if actor.is_running and actor.learner != endpoints[actor.number]:
                actor.is_moving = True
                actor.stop()

    def _endpoints_of_actors(self, kept: Sequence[RayProcess]) -> dict[int, str]:
        """Return the address of each actor's rank; those in `kept` that run keep the one they have."""
        staying = [actor for actor in kept if actor.is_running and actor.learner in self._endpoints]
        assigned = assign_ranks(
            actors={actor.number: actor.host.node for actor in self._actors},
            ranks=[rank.host.node for rank in self._ranks[: len(self._endpoints)]],
            kept={actor.number: self._endpoints.index(actor.learner) for actor in staying},
        )
        return {number: self._endpoints[rank] for number, rank in assigned.items()}

    # The end.

    def _final_code(self) -> int | None:
        """Return the learner's exit code once no rank runs or will run, or a rank has failed for good."""
        codes = [rank.exit_code for rank in self._ranks if rank.is_over and rank.exit_code]
        is_fatal = any(code in FATAL_CODES for code in codes)
        are_over = all(rank.is_over or (self.is_interrupted and not rank.is_running) for rank in self._ranks)
        return (codes[0] if codes else 0) if are_over or is_fatal else None

    def _note_signals(self) -> None:
        def note(number: int, _: object) -> None:
            self._signals += 1
            self._newest_signal = number

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, note)

    def _obey_signals(self) -> None:
        """Pass signals on: the first asks the learner to stop cleanly, a second makes it end at once."""
        if self._signals > self._obeyed:
            self._obeyed = self._signals
            self._signalled_at = min(self._signalled_at, time.monotonic())
            for rank in self._ranks:
                rank.stop(self._newest_signal)
        if time.monotonic() > self._signalled_at + STOP_SECONDS:
            raise _Ended("the learner did not end in time and was killed", KILLED)

    def _end_everything(self) -> None:
        """Ask all processes to end; those that do not are killed with their hosts."""
        deadline = time.monotonic() + GOODBYE_SECONDS
        for process in self._all():
            process.stop()
        while any(process.is_running for process in self._all()) and time.monotonic() < deadline:
            for process, news in self._news():
                if isinstance(news, int | RayActorError):
                    process.is_running = False
        self._autoscaler.close()


def _address_of(rank: RayProcess) -> RankAddress:
    return RankAddress(rank.number, rank.host.node, rank.host.address, *rank.host.ports)


class _Ended(SeedrlError):
    """The learner has ended for good, with this exit code."""

    def __init__(self, words: str, code: int) -> None:
        super().__init__(words)
        self.exit_code = code if code >= 0 else 128 - code
