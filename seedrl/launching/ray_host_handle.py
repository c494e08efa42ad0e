"""The driver's handle on the host of one process: asks Ray for it, sends it calls, and reads what it sends.

Knows nothing of the process that the host runs, but for its place.
"""

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


class HostHandle:
    """A host over its restarts by Ray, on whichever machine it is. Owned by the driver."""

    def __init__(
        self, config: RunConfig, place: PlacedProcess, group: PlacementGroup, bundle: int, run_directory: str
    ) -> None:
        self._place = place
        self._run_directory = run_directory
        self._handle = _create(config, place, group, bundle)
        self.pending: Any = None  # a reference to what the host will send next
        self._ready: HostReady | None = None  # None while it is awaited
        self._killed: HostReady | None = None  # the host that was killed last
        self._awaited_since = 0.0
        self._is_reported = False  # that the host is late
        self.node = ""  # the name of its machine, or of its last one
        self.address = ""  # the address of that machine
        self.ports = [0, 0] if place.role == LEARNER else []  # one to listen on, one for ranks to meet at

    @property
    def is_ready(self) -> bool:
        return self._ready is not None

    def request(self) -> None:
        """Await a host, which Ray starts or restarts if it has to."""
        self._ready = None
        self._awaited_since, self._is_reported = time.monotonic(), False
        self._ask_if_ready()

    def _ask_if_ready(self) -> None:
        self.pending = self._handle.report_ready.options(max_task_retries=-1).remote(self.ports, self._run_directory)

    def restart(self) -> None:
        """Kill the host, so that Ray restarts it."""
        self._killed = self._ready
        ray.kill(self._handle, no_restart=False)
        self.request()

    def take(self, host: HostReady) -> None:
        """Take note of a new host, unless it is the one that was killed, which may still answer."""
        if self._killed is not None and self._killed[:2] == host[:2]:
            self._ask_if_ready()
            return
        node = next(node for node in ray.nodes() if node["NodeID"] == host.node)
        before, self.node, self.address = self.node, name_of(node), node["NodeManagerAddress"]
        self._ready, self.ports = host, host.ports
        if before:
            say(f"{self._place.name} is back on {self.node}, {time.monotonic() - self._awaited_since:.1f} s later")
        if before not in ("", self.node) and self._place.role == LEARNER and not host.is_resumable:
            say(
                f"{self._place.name} finds no checkpoint in {self._run_directory} on {self.node} and starts over; "
                "a learner that moves needs a run_dir that its machines share"
            )

    def report_if_late(self) -> None:
        is_late = self._ready is None and time.monotonic() > self._awaited_since + PATIENCE_SECONDS
        if is_late and not self._is_reported:
            self._is_reported = True
            say(f"{self._place.name} waits for Ray to find a place")

    def run(self, module: str, arguments: list[str], more: dict[str, str]) -> None:
        """Start a module on the host with further variables. The output of a learner is passed on line by line."""
        run = self._handle.run.options(num_returns="streaming")
        is_followed = self._place.role == LEARNER
        self.pending = run.remote(module, arguments, {**more, "NODE_NAME": self.node}, os.getcwd(), is_followed)

    def stop(self, number: int) -> None:
        """Ask the process on the host by a signal to end cleanly; a second call makes it end at once."""
        self._handle.stop.remote(number)

    def desired_actors(self) -> Any:
        """Ask a learner how many actors it could use; return a reference to the answer."""
        return self._handle.desired_actors.remote(self._run_directory)

    def news(self, pending: Any) -> Iterator[News]:
        """Yield everything that has been sent so far; nothing if something else is awaited by now."""
        is_stream = isinstance(pending, ray.ObjectRefGenerator)  # of a process that runs
        try:
            while self.pending is pending and ray.wait([pending], timeout=0, fetch_local=False)[0]:
                news = ray.get(next(pending)) if is_stream else HostReady(*ray.get(pending))
                if not isinstance(news, str):
                    self.pending = None
                yield news
        except RayActorError as error:
            self.pending = None
            yield error


def _create(config: RunConfig, place: PlacedProcess, group: PlacementGroup, bundle: int) -> Any:
    """Let Ray create the host in a bundle of the placement group; return Ray's handle on it."""
    role = role_of(config, place)
    needed = resources_of(role)
    options = ray.remote(RayHost).options(
        name=place.name,  # as Ray shows it
        num_cpus=needed.get("CPU", 0),
        num_gpus=needed.get("GPU", 0),
        memory=needed.get("memory"),
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        max_restarts=config.max_restarts if place.role == LEARNER else config.actors.max_restarts,
        max_concurrency=4,  # it answers other calls while it runs the process
        runtime_env={"env_vars": variables(config.launch, role, {})},  # over its machine's own
    )
    return options.remote(place.name)
