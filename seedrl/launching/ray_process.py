"""One process of a job over all its restarts on Ray, as the driver sees it. Knows nothing of the other processes."""

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
from seedrl.launching.environment import variables
from seedrl.launching.placement import LEARNER, PlacedProcess
from seedrl.launching.ray_cluster import PATIENCE_SECONDS, name_of, say
from seedrl.launching.ray_host import HostReady, RayHost
from seedrl.launching.ray_reservation import resources_of, role_of

News = str | int | HostReady | RayActorError  # a line of output, an exit code, its host is ready, its host is lost


class RayProcess:
    """A process whose host is awaited, is ready, or runs it. Owned by the driver."""

    def __init__(
        self, config: RunConfig, place: PlacedProcess, group: PlacementGroup, bundle: int, run_directory: str
    ) -> None:
        self.name, self.number = place.name, place.number
        self.is_learner = place.role == LEARNER
        self._run_directory = run_directory
        self._handle = self._host(config, place, group, bundle)
        self.pending: Any = None  # a reference to what the host will send next
        self.host: HostReady | None = None  # None while it is awaited
        self._killed: HostReady | None = None  # the host that was killed last
        self._awaited_since = 0.0
        self._is_reported = False  # that the host is late
        self.node = ""  # the name of its machine, or of its last one
        self.address = ""  # the address of that machine
        self.ports = [0, 0] if self.is_learner else []  # one to listen on, one for ranks to meet at
        self.learner = ""  # the address that an actor streams to
        self.is_running = False
        self.is_moving = False  # it is an actor that changes its learner
        self.is_over = False  # it will not be started again
        self.leaves_by = math.inf  # when an actor that is not needed any more has to be gone
        self.due = 0.0  # it may not be started before
        self.exit_code: int | None = None  # the previous one; negative: ended by a signal
        self.last_words = ""

    def _host(self, config: RunConfig, place: PlacedProcess, group: PlacementGroup, bundle: int) -> Any:
        role = role_of(config, place)
        needed = resources_of(role)
        options = ray.remote(RayHost).options(
            name=self.name,  # as Ray shows it
            num_cpus=needed.get("CPU", 0),
            num_gpus=needed.get("GPU", 0),
            memory=needed.get("memory"),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            max_restarts=config.max_restarts if self.is_learner else config.actors.max_restarts,
            max_concurrency=4,  # it answers other calls while it runs the process
            runtime_env={"env_vars": variables(config.launch, role, {})},  # over its machine's own
        )
        return options.remote(self.name)

    # The host.

    def request_host(self) -> None:
        """Await a host, which Ray starts or restarts if it has to."""
        self.host, self.is_running, self.is_moving = None, False, False
        self._awaited_since, self._is_reported = time.monotonic(), False
        self._request()

    def _request(self) -> None:
        self.pending = self._handle.report_ready.options(max_task_retries=-1).remote(self.ports, self._run_directory)

    def restart(self) -> None:
        """Kill the host, so that Ray restarts it."""
        self._killed = self.host
        ray.kill(self._handle, no_restart=False)
        self.request_host()

    def host_ready(self, host: HostReady) -> None:
        """Take note of a new host, unless it is the one that was killed, which may still answer."""
        if self._killed is not None and self._killed[:2] == host[:2]:
            self._request()
            return
        node = next(node for node in ray.nodes() if node["NodeID"] == host.node)
        before, self.node, self.address = self.node, name_of(node), node["NodeManagerAddress"]
        self.host, self.ports = host, host.ports
        if before:
            say(f"{self.name} is back on {self.node}, {time.monotonic() - self._awaited_since:.1f} s later")
        if before not in ("", self.node) and self.is_learner and not host.is_resumable:
            say(
                f"{self.name} finds no checkpoint in {self._run_directory} on {self.node} and starts over; "
                "a learner that moves needs a run_dir that its machines share"
            )

    def report_if_late(self) -> None:
        is_late = self.host is None and time.monotonic() > self._awaited_since + PATIENCE_SECONDS
        if is_late and not self._is_reported:
            self._is_reported = True
            say(f"{self.name} waits for Ray to find a place")

    # The process.

    @property
    def can_start(self) -> bool:
        is_idle = self.host is not None and not self.is_running and not self.is_over
        return is_idle and time.monotonic() >= self.due

    def start(self, module: str, arguments: list[str], more: dict[str, str]) -> None:
        """Start a module on the host with further variables. The output of a learner is passed on line by line."""
        run = self._handle.run.options(num_returns="streaming")
        self.pending = run.remote(module, arguments, {**more, "NODE_NAME": self.node}, os.getcwd(), self.is_learner)
        self.is_running = True

    def desired_actors(self) -> Any:
        """Ask a learner how many actors it could use; return a reference to the answer."""
        return self._handle.desired_actors.remote(self._run_directory)

    def stop(self) -> None:
        if self.is_running:
            self._handle.stop.remote()

    def news(self, pending: Any) -> Iterator[News]:
        """Yield everything that has been sent so far; nothing if something else is awaited by now."""
        try:
            while self.pending is pending and ray.wait([pending], timeout=0, fetch_local=False)[0]:
                news = ray.get(next(pending)) if self.is_running else HostReady(*ray.get(pending))
                if not isinstance(news, str):
                    self.pending = None
                yield news
        except RayActorError as error:
            self.pending = None
            yield error
