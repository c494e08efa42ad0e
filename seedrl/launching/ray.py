"""A job on a Ray cluster: `seedrl run launch=ray`. Placement, resources, restarts and variables are Ray's.

Each process of the job is the child of a Ray actor (`host.py`), and this is the driver: it reserves a placement group
(`bundles.py`), has Ray start a host for each process in it, and tells every host that arrives what to run. A host that
dies, alone or with its machine, is restarted by Ray wherever the group has room then; a process that fails takes its
host with it, so that this, too, is Ray's to restart and to count. Knows nothing of torch.
"""

import contextlib
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from seedrl.config import RunConfig, SecurityConfig
from seedrl.errors import ConfigError, SeedrlError
from seedrl.exposure import check_client_security, check_learner_security, is_local, is_socket
from seedrl.launching.bundles import GIB, Layout, layout, resources_of, role_of
from seedrl.launching.environment import variables
from seedrl.launching.host import Arrival, Host
from seedrl.launching.local import (
    GOODBYE_SECONDS,
    HOPELESS,
    RETURN_SECONDS,
    STOP_SECONDS,
    actor_settings,
    quoted,
)
from seedrl.launching.placement import LEARNER, Node, Place, place
from seedrl.rules import check
from seedrl.rundir import RunDirectory
from seedrl.status import DRAINED

POLL_SECONDS = 0.2
PATIENCE_SECONDS = 10.0  # until it is said that Ray has found no place yet
OBJECT_STORE_BYTES = 100 * 2**20  # of a Ray of our own: nothing is put there
KILLED = 128 + signal.SIGKILL


def run_on_ray(config: RunConfig, overrides: Sequence[str]) -> None:
    """Returns when training is over; exits after a signal, or with the learner's code if it failed."""
    check(config)
    with _connected(config.launch.address):
        nodes = alive()
        refuse_exposure(config, {node["NodeManagerAddress"] for node in nodes})
        decided = layout(config, place(config, [as_node(node) for node in nodes]))
        run = RunDirectory.prepare(config)
        job = RayJob(config, overrides, run.path.resolve())
        with reserved(decided, config.launch.name, lambda: job.is_interrupted) as group:
            code = job.run(decided, group)
    if code or job.is_interrupted:  # the latter ends a multirun, too
        raise SystemExit(code if code >= 0 else 128 - code)


# The cluster.


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    """To a cluster, or to a new one on this machine that ends with this block."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of hosts that are asked to stop while they are lost
    own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **({} if address else own))
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"launch.address={address}: Ray says {str(error).strip().splitlines()[0]}") from error
    try:
        yield
    finally:
        ray.shutdown()


def alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def as_node(node: dict[str, Any]) -> Node:
    """What it has in all: Ray queues a job that has to wait for others to end."""
    resources = node["Resources"]
    return Node(
        _name_of(node),
        cpus=resources.get("CPU", 0.0),
        gpus=resources.get("GPU", 0.0),
        memory_gb=resources.get("memory", 0.0) / GIB,
        labels=frozenset(node.get("Labels", {}).items()),
    )


def _name_of(node: dict[str, Any]) -> str:
    """For people; several nodes may have one address."""
    return f"{node['NodeName']}-{node['NodeID'][:6]}"


def refuse_exposure(config: RunConfig, addresses: set[str]) -> None:
    """What the learner and its actors would refuse later, wherever Ray puts them."""
    if len(addresses) == 1:
        return
    if config.listen and is_local(config.listen):
        raise ConfigError(
            f"listen={config.listen} can be reached from one machine, and the cluster has {len(addresses)}"
        )
    for address in sorted(addresses):
        anywhere = f"{_bracketed(address)}:0"
        check_learner_security(replace(config, listen=config.listen or anywhere))
        check_client_security(anywhere, _actor_security(config))


@contextlib.contextmanager
def reserved(decided: Layout, name: str, is_called_off: Callable[[], bool]) -> Iterator[PlacementGroup]:
    """Room for all processes at once; waits until the cluster has it."""
    group = placement_group(
        [bundle.resources for bundle in decided.bundles],
        strategy=decided.strategy,
        name=name,
        bundle_label_selector=[bundle.labels for bundle in decided.bundles],
    )
    try:
        began, is_told = time.monotonic(), False
        while not group.wait(POLL_SECONDS) and not is_called_off():
            if not is_told and time.monotonic() > began + PATIENCE_SECONDS:
                _say("ray: the cluster is large enough, but others use it; waiting for room")
                is_told = True
        yield group
    finally:
        remove_placement_group(group)


# The driver.


@dataclass
class Hosted:
    """One process of the job over all its lives, as the driver sees it."""

    place: Place
    handle: Any  # of its Ray actor
    arrival: Arrival | None = None
    node: str = ""  # where it is or was last, for people
    host: str = ""  # that machine's address
    ports: list[int] = field(default_factory=list)  # asked for
    pending: Any = None  # an arrival, or the words of a process
    is_running: bool = False
    is_over: bool = False  # a rank: it has ended for good
    address: str = ""  # an actor's learner
    is_moving: bool = False  # to another learner
    due: float = 0.0  # not to be started before
    gone: float = 0.0  # since when it has been awaited
    is_told: bool = False  # that this takes long
    killed_pid: int = 0
    last_words: str = ""
    exit_code: int | None = None

    @property
    def name(self) -> str:
        number = self.place.number
        return f"{self.place.role}-{number}" if self.place.role != LEARNER or number else LEARNER

    @property
    def is_learner(self) -> bool:
        return self.place.role == LEARNER

    @property
    def can_start(self) -> bool:
        is_idle = self.arrival is not None and not self.is_running and not self.is_over
        return is_idle and time.monotonic() >= self.due

    def stop(self) -> None:
        if self.is_running:
            self.handle.stop.remote()


class RayJob:
    """Starts what has arrived, awaits what is gone, ends with the learner. Owned by the main thread."""

    def __init__(self, config: RunConfig, overrides: Sequence[str], run_directory: Path) -> None:
        self._config = config
        self._overrides = overrides
        self._run_directory = str(run_directory)
        self._directory = os.getcwd()
        self._is_one_machine = len({node["NodeManagerAddress"] for node in alive()}) == 1
        self._ranks: list[Hosted] = []
        self._actors: list[Hosted] = []
        self._endpoints: list[str] = []  # of the ranks that run; none while they do not
        self._signals = self._obeyed = 0
        self._signalled_at = math.inf
        self._forward_signals()

    @property
    def is_interrupted(self) -> bool:
        return self._signals > 0

    def run(self, decided: Layout, group: PlacementGroup) -> int:
        """Until the learner has ended for good; returns its code."""
        self._create(decided, group)
        self._show(decided, group)
        for each in self._all():
            self._await(each)
        try:
            while (code := self._step()) is None:
                pass
            return code
        finally:
            self._end_actors()

    def _all(self) -> list[Hosted]:
        return [*self._ranks, *self._actors]

    def _create(self, decided: Layout, group: PlacementGroup) -> None:
        """A host for each process, in its bundle."""
        for index, bundle in enumerate(decided.bundles):
            for where in bundle.places:
                hosted = Hosted(where, None)
                hosted.handle = self._host(hosted, group, index)
                (self._ranks if hosted.is_learner else self._actors).append(hosted)
        self._ranks.sort(key=lambda each: each.place.number)

    def _host(self, hosted: Hosted, group: PlacementGroup, bundle: int) -> Any:
        role = role_of(self._config, hosted.place)
        needed = resources_of(role)
        limit = self._config.max_restarts if hosted.is_learner else self._config.actors.max_restarts
        return (
            ray.remote(Host)
            .options(
                num_cpus=needed.get("CPU", 0),
                num_gpus=needed.get("GPU", 0),
                memory=needed.get("memory"),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
                name=hosted.name,  # as Ray shows it to people
                max_restarts=limit,
                max_concurrency=3,  # it can be asked to stop while it runs something
                runtime_env={"env_vars": variables(self._config.launch, role, {})},  # over its machine's own
            )
            .remote(hosted.name)
        )

    def _show(self, decided: Layout, group: PlacementGroup) -> None:
        names = {node["NodeID"]: _name_of(node) for node in alive()}
        nodes = placement_group_table(group).get("bundles_to_node_id", {})
        placed = [
            (names.get(nodes.get(index, ""), "a new node"), Hosted(where, None).name)
            for index, bundle in enumerate(decided.bundles)
            for where in bundle.places
        ]
        for node, members in groupby(sorted(placed), lambda each: each[0]):
            _say(f"ray: {', '.join(name for _, name in members)} on {node}")

    # What hosts tell.

    def _step(self) -> int | None:
        """The learner's exit code, if the job is over."""
        for hosted, news in self._heard():
            match news:
                case str():
                    hosted.last_words = news
                    if hosted.is_learner:
                        print(news, flush=True)
                case int():
                    self._ended(hosted, news)
                case Arrival():
                    self._arrived(hosted, news)
                case RayActorError():
                    self._lost(hosted, news)
        self._obey_signals()
        self._start_whoever_can()
        self._tell_who_is_awaited()
        return self._final_code()

    def _heard(self) -> Iterator[tuple[Hosted, str | int | Arrival | RayActorError]]:
        waiting = {each.pending: each for each in self._all() if each.pending is not None}
        if not waiting:
            time.sleep(POLL_SECONDS)
            return
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=POLL_SECONDS, fetch_local=False)
        for pending in ready:
            yield from ((waiting[pending], news) for news in self._news(waiting[pending], pending))

    def _news(self, hosted: Hosted, pending: Any) -> Iterator[str | int | Arrival | RayActorError]:
        """All that one host has told so far."""
        try:
            if not hosted.is_running:
                hosted.pending = None
                yield Arrival(*ray.get(pending))
                return
            while ray.wait([pending], timeout=0, fetch_local=False)[0]:
                news = ray.get(next(pending))
                if isinstance(news, int):
                    hosted.pending = None
                    yield news
                    return
                yield news
        except RayActorError as error:
            hosted.pending = None
            yield error

    def _await(self, hosted: Hosted) -> None:
        """Ray restarts it, if it has to, and answers when it is there."""
        hosted.arrival, hosted.is_running = None, False
        hosted.gone, hosted.is_told = hosted.gone or time.monotonic(), False
        if hosted.is_learner and not hosted.ports:
            hosted.ports = [self._port_of(hosted), 0]
        hosted.pending = hosted.handle.arrive.options(max_task_retries=-1).remote(hosted.ports, self._run_directory)

    def _port_of(self, rank: Hosted) -> int:
        """0 for any."""
        port = self._config.listen.rpartition(":")[2]
        return int(port) + rank.place.number if port.isdecimal() and int(port) else 0

    def _arrived(self, hosted: Hosted, arrival: Arrival) -> None:
        if arrival.pid == hosted.killed_pid:  # it has not noticed yet
            self._await(hosted)
            return
        before, hosted.arrival = hosted.node, arrival
        hosted.ports = arrival.ports
        node = next(node for node in ray.nodes() if node["NodeID"] == arrival.node)
        hosted.node, hosted.host = _name_of(node), node["NodeManagerAddress"]
        if before:
            _say(f"ray: {hosted.name} is back on {hosted.node}, {time.monotonic() - hosted.gone:.1f} s later")
        if hosted.is_learner and hosted.place.number == 0 and before not in ("", hosted.node):
            self._tell_if_lost(hosted, arrival)
        hosted.gone = 0.0

    def _tell_if_lost(self, learner: Hosted, arrival: Arrival) -> None:
        if not arrival.is_resumable:
            _say(
                f"ray: the learner finds no checkpoint in {self._run_directory} on {learner.node} and starts anew; "
                "a learner that moves needs a run_dir that its machines share"
            )

    def _lost(self, hosted: Hosted, error: RayActorError) -> None:
        """Its host is gone, or will never come."""
        if isinstance(error, ActorDiedError):
            self._give_up(hosted, error)
            return
        hosted.gone = 0.0
        _say(f"ray: {hosted.name} on {hosted.node} is gone; Ray restarts it")
        self._await(hosted)
        if hosted.is_learner:
            self._restart_other_ranks(hosted)

    def _give_up(self, hosted: Hosted, error: ActorDiedError) -> None:
        """Ray has restarted it as often as it may, or could not start it at all."""
        setting = "max_restarts" if hosted.is_learner else "actors.max_restarts"
        words = hosted.last_words or str(error).strip().splitlines()[-1].strip()
        if not hosted.node:
            raise SeedrlError(f"{hosted.name} cannot run on Ray; is seedrl installed on every node? Ray says: {words}")
        message = f"{hosted.name} has been restarted as often as {setting} allows; last: {words}"
        if hosted.is_learner:
            raise _Ended(message, hosted.exit_code or 1)
        _say(f"ray: {message}")
        self._actors.remove(hosted)
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
        rank.is_over = code == 0 or code in HOPELESS or self.is_interrupted
        if rank.is_over:
            return
        _say(f"ray: {rank.name} on {rank.node} ended with code {code} ({rank.last_words}); Ray restarts it")
        self._restart(rank)
        self._restart_other_ranks(rank)

    def _restart_other_ranks(self, first: Hosted) -> None:
        """None of them can go on alone."""
        self._endpoints = []
        for rank in self._ranks:
            rank.is_over = False
            if rank is not first and rank.arrival is not None:
                self._restart(rank)

    def _restart(self, hosted: Hosted) -> None:
        assert hosted.arrival is not None
        hosted.killed_pid, hosted.gone = hosted.arrival.pid, 0.0
        ray.kill(hosted.handle, no_restart=False)
        self._await(hosted)

    def _actor_ended(self, actor: Hosted, code: int) -> None:
        if actor.is_moving:
            actor.is_moving = False
        elif code in HOPELESS:
            raise HOPELESS[code](f"{actor.name} cannot run: {actor.last_words}")
        elif code == 0 or not self._endpoints:  # told that training is over, or that there is no learner
            actor.due = math.inf if actor.last_words.endswith(DRAINED) else time.monotonic() + RETURN_SECONDS
        else:
            _say(f"ray: {actor.name} on {actor.node} ended with code {code} ({actor.last_words}); Ray restarts it")
            self._restart(actor)

    # What hosts are told.

    def _start_whoever_can(self) -> None:
        if self.is_interrupted:
            return
        if all(rank.can_start for rank in self._ranks):
            self._start_ranks()
        if self._endpoints:
            for actor in self._actors:
                if actor.can_start:
                    self._start_actor(actor)

    def _start_ranks(self) -> None:
        """All at once; an actor that has another address for its learner moves."""
        self._endpoints = [self._listening(rank)[1] for rank in self._serving_ranks]
        for rank in self._ranks:
            run_directory = f"run_dir={quoted(self._run_directory)}"
            arguments = ["learner", *self._overrides, run_directory, *self._listening(rank)[0]]
            self._start(rank, "seedrl", arguments, self._identity(rank))
        for actor in self._actors:
            if actor.is_running and actor.address != self._endpoint_for(actor):
                actor.is_moving = True
                actor.stop()

    @property
    def _serving_ranks(self) -> list[Hosted]:
        return self._ranks[:1] if self._config.ranks.separate else self._ranks

    def _identity(self, rank: Hosted) -> dict[str, str]:
        """What torchrun would tell a rank."""
        first, beside = self._ranks[0], [each for each in self._ranks if each.node == rank.node]
        sees_all = not self._config.launch.learner.gpus  # else Ray shows each its own, and that is number 0
        return {
            "RANK": str(rank.place.number),
            "WORLD_SIZE": str(len(self._ranks)),
            "LOCAL_RANK": str(beside.index(rank) if sees_all else 0),
            "LOCAL_WORLD_SIZE": str(len(beside)),
            "MASTER_ADDR": "127.0.0.1" if self._is_one_machine else first.host,
            "MASTER_PORT": str(first.ports[1]),
        }

    def _listening(self, rank: Hosted) -> tuple[list[str], str]:
        """A rank's settings, and where actors find it: at listen's port plus its number."""
        listen, number = self._config.listen, rank.place.number
        if is_socket(listen):
            return [f"listen={quoted(listen)}"], f"{listen}.{number}" if number else listen
        port = self._port_of(rank) or rank.ports[0]
        host = listen.rpartition(":")[0] or _bracketed("127.0.0.1" if self._is_one_machine else rank.host)
        settings = [f"listen={quoted(f'{host}:{port - number}')}"]
        if is_local(f"{host}:{port}"):
            return settings, f"{host}:{port}"
        return [*settings, f"ranks.advertise={quoted(_bracketed(rank.host))}"], f"{_bracketed(rank.host)}:{port}"

    def _endpoint_for(self, actor: Hosted) -> str:
        """Actors go to the ranks in turns: an update needs unrolls of every rank."""
        return self._endpoints[actor.place.number % len(self._endpoints)]

    def _start_actor(self, actor: Hosted) -> None:
        actor.address = self._endpoint_for(actor)
        security = _actor_security(self._config)
        settings = actor_settings(self._config, actor.address, actor.name)
        settings += [
            f"security.{key}={quoted(value)}" for key, value in vars(security).items() if isinstance(value, str)
        ]
        settings.append(f"security.allow_insecure={security.allow_insecure}")
        self._start(actor, "envs_server", settings, {})

    def _start(self, hosted: Hosted, module: str, arguments: list[str], more: dict[str, str]) -> None:
        said = {**more, "NODE_NAME": hosted.node}
        run = hosted.handle.run.options(num_returns="streaming")
        hosted.pending = run.remote(module, arguments, said, self._directory, hosted.is_learner)
        hosted.is_running = True

    # The end.

    def _final_code(self) -> int | None:
        """Of the learner, once none of its ranks runs or is going to, or one would only fail again."""
        codes = [rank.exit_code for rank in self._ranks if rank.is_over and rank.exit_code]
        is_hopeless = any(code in HOPELESS for code in codes)
        are_over = all(rank.is_over or (self.is_interrupted and not rank.is_running) for rank in self._ranks)
        return (codes[0] if codes else 0) if are_over or is_hopeless else None

    def _forward_signals(self) -> None:
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

    def _end_actors(self) -> None:
        """Whoever is still there is asked to end; what does not is killed with its host."""
        deadline = time.monotonic() + GOODBYE_SECONDS
        for actor in self._actors:
            actor.stop()
        while any(actor.is_running for actor in self._actors) and time.monotonic() < deadline:
            for hosted, news in self._heard():
                if isinstance(news, int | RayActorError):
                    hosted.is_running = False

    def _tell_who_is_awaited(self) -> None:
        for hosted in self._all():
            if hosted.gone and not hosted.is_told and time.monotonic() > hosted.gone + PATIENCE_SECONDS:
                hosted.is_told = True
                _say(f"ray: {hosted.name} has no place yet")


class _Ended(SeedrlError):
    """The learner has, for good."""

    def __init__(self, words: str, code: int) -> None:
        super().__init__(words)
        self.exit_code = code if code >= 0 else 128 - code


def _actor_security(config: RunConfig) -> SecurityConfig:
    """How actors of other machines reach the learner."""
    given = config.launch.security
    return replace(
        given,
        token_file=given.token_file or config.security.token_file,
        allow_insecure=given.allow_insecure or config.security.allow_insecure,
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
