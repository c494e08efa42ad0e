"""One process of a job over all its lives on Ray, as the driver sees it. Knows nothing of the others."""

import math
import os
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from seedrl.config import RunConfig
from seedrl.launching.bundles import resources_of, role_of
from seedrl.launching.environment import variables
from seedrl.launching.host import Arrival, Host
from seedrl.launching.placement import LEARNER, Place
from seedrl.launching.raycluster import PATIENCE_SECONDS, name_of, say

News = str | int | Arrival | RayActorError  # it said something, it ended, its host is there, its host is gone


class Hosted:
    """Its host is awaited, or there, or runs the process. Owned by the driver."""

    def __init__(self, config: RunConfig, place: Place, group: PlacementGroup, bundle: int, run_directory: str) -> None:
        self.name, self.number = place.name, place.number
        self.is_learner = place.role == LEARNER
        self._run_directory = run_directory
        self._handle = self._host(config, place, group, bundle)
        self.pending: Any = None  # the host's arrival, or the words of the process
        self.arrival: Arrival | None = None  # of the host that is there
        self._killed: Arrival | None = None  # the one that was killed last
        self._gone = 0.0  # since when it has been awaited
        self._is_told = False  # that this takes long
        self.node = ""  # where it is or was last, for people
        self.address = ""  # of that machine
        self.ports = [0, 0] if self.is_learner else []  # to listen on, and for ranks to meet
        self.learner = ""  # an actor's learner's address
        self.is_running = False
        self.is_moving = False  # to another learner
        self.is_over = False  # it is not to be started again
        self.leaves_by = math.inf  # an actor that is not needed any more
        self.due = 0.0  # it is not to be started before
        self.exit_code: int | None = None  # of the process before; negative: ended by a signal
        self.last_words = ""

    def _host(self, config: RunConfig, place: Place, group: PlacementGroup, bundle: int) -> Any:
        role = role_of(config, place)
        needed = resources_of(role)
        options = ray.remote(Host).options(
            name=self.name,  # as Ray shows it to people
            num_cpus=needed.get("CPU", 0),
            num_gpus=needed.get("GPU", 0),
            memory=needed.get("memory"),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            max_restarts=config.max_restarts if self.is_learner else config.actors.max_restarts,
            max_concurrency=4,  # it can be asked to stop, and what it needs, while it runs something
            runtime_env={"env_vars": variables(config.launch, role, {})},  # over its machine's own
        )
        return options.remote(self.name)

    # Its host.

    def summon(self) -> None:
        """Ray starts or restarts the host, if it has to, and answers when it is there."""
        self.arrival, self.is_running, self.is_moving = None, False, False
        self._gone, self._is_told = time.monotonic(), False
        self._ask()

    def _ask(self) -> None:
        self.pending = self._handle.arrive.options(max_task_retries=-1).remote(self.ports, self._run_directory)

    def restart(self) -> None:
        """Ends the host that is there, so that Ray restarts it."""
        self._killed = self.arrival
        ray.kill(self._handle, no_restart=False)
        self.summon()

    def arrived(self, arrival: Arrival) -> bool:
        """Whether it has really: one that was killed may answer still."""
        if self._killed is not None and self._killed[:2] == arrival[:2]:
            self._ask()
            return False
        node = next(node for node in ray.nodes() if node["NodeID"] == arrival.node)
        before, self.node, self.address = self.node, name_of(node), node["NodeManagerAddress"]
        self.arrival, self.ports = arrival, arrival.ports
        if before:
            say(f"{self.name} is back on {self.node}, {time.monotonic() - self._gone:.1f} s later")
        if before not in ("", self.node) and self.is_learner and not arrival.is_resumable:
            say(
                f"{self.name} finds no checkpoint in {self._run_directory} on {self.node} and starts anew; "
                "a learner that moves needs a run_dir that its machines share"
            )
        return True

    def tell_if_awaited(self) -> None:
        is_late = self.arrival is None and time.monotonic() > self._gone + PATIENCE_SECONDS
        if is_late and not self._is_told:
            self._is_told = True
            say(f"{self.name} has no place yet")

    # Its process.

    @property
    def can_start(self) -> bool:
        is_idle = self.arrival is not None and not self.is_running and not self.is_over
        return is_idle and time.monotonic() >= self.due

    def start(self, module: str, arguments: list[str], more: dict[str, str]) -> None:
        """With these variables besides. What a learner says is followed."""
        run = self._handle.run.options(num_returns="streaming")
        self.pending = run.remote(module, arguments, {**more, "NODE_NAME": self.node}, os.getcwd(), self.is_learner)
        self.is_running = True

    def desired_actors(self) -> Any:
        """What a learner could use, once Ray has asked it: a reference."""
        return self._handle.desired_actors.remote(self._run_directory)

    def stop(self) -> None:
        if self.is_running:
            self._handle.stop.remote()

    def news(self, pending: Any) -> Iterator[News]:
        """All that has been told so far; nothing if something else is awaited by now."""
        try:
            while self.pending is pending and ray.wait([pending], timeout=0, fetch_local=False)[0]:
                told = ray.get(next(pending)) if self.is_running else Arrival(*ray.get(pending))
                if not isinstance(told, str):
                    self.pending = None
                yield told
        except RayActorError as error:
            self.pending = None
            yield error
