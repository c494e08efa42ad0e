"""Starts and ends actors of a job on Ray as its learner needs them, between actors.count and actors.at_most.

Each further actor has a placement group of its own, which takes room when the actor starts and gives it back when it
ends. Knows nothing of how the demand is estimated.
"""

import math
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from seedrl.config import RunConfig
from seedrl.launching.actors import FOLLOW_SECONDS, wanted_actors
from seedrl.launching.children import GOODBYE_SECONDS
from seedrl.launching.placement import ACTOR, PlacedProcess
from seedrl.launching.ray_cluster import say
from seedrl.launching.ray_host_handle import HostHandle
from seedrl.launching.ray_process import RayProcess
from seedrl.launching.ray_reservation import bundle_of


class RayAutoscaler:
    """Adds actors to the job and removes them. Owned by the driver, whose list of actors it changes."""

    def __init__(self, config: RunConfig, run_directory: str, actors: list[RayProcess]) -> None:
        self._config = config
        self._run_directory = run_directory
        self._actors = actors
        self._groups: dict[int, PlacementGroup] = {}  # of the actors started here, by number
        self._given_up: set[int] = set()  # numbers of actors that Ray restarts no more
        self._asked = -math.inf  # when the learner was last asked
        self._answer: Any = None  # a reference to what the learner will answer

    def follow_demand(self, learner: RayProcess) -> None:
        """Start actors that the learner could use and end those it does not need, the newest first."""
        for actor in [actor for actor in self._actors if time.monotonic() > actor.leaves_by]:
            self.remove(actor)
        desired = self._desired(learner)
        if not desired:
            return
        wanted = wanted_actors(self._config, desired)
        staying = sorted((a for a in self._actors if a.leaves_by == math.inf), key=lambda actor: actor.number)
        free = set(range(self._config.actors.at_most)) - {actor.number for actor in self._actors} - self._given_up
        for number in sorted(free)[: max(0, wanted - len(staying))]:
            self._start(number, wanted)
        for actor in staying[wanted:]:
            self._end(actor, wanted)

    def remove(self, actor: RayProcess) -> None:
        """Forget an actor and free its room, which ends it if it still runs."""
        self._actors.remove(actor)
        self._free(actor.number)

    def give_up(self, actor: RayProcess) -> None:
        """Remove an actor and never start one with its number again."""
        self._given_up.add(actor.number)
        self.remove(actor)

    def close(self) -> None:
        """Free the room of all actors started here."""
        for number in list(self._groups):
            self._free(number)

    def _free(self, number: int) -> None:
        if number in self._groups:
            remove_placement_group(self._groups.pop(number))

    def _desired(self, learner: RayProcess) -> int:
        """Return the number of actors that the learner has asked for; 0 if it has not answered yet."""
        if self._answer is not None:
            if not ray.wait([self._answer], timeout=0)[0]:
                return 0
            answer, self._answer = self._answer, None
            try:
                return int(ray.get(answer))
            except RayError:  # its host is lost
                return 0
        if learner.is_running and time.monotonic() > self._asked + FOLLOW_SECONDS:
            self._asked = time.monotonic()
            self._answer = learner.host.desired_actors()
        return 0

    def _start(self, number: int, wanted: int) -> None:
        place = PlacedProcess(ACTOR, number, "")
        bundle = bundle_of(self._config, (place,))
        group = placement_group([bundle.resources], bundle_label_selector=[bundle.labels])
        actor = RayProcess(place, HostHandle(self._config, place, group, 0, self._run_directory))
        say(f"the learner could use {wanted} actors: starting {actor.name}")
        self._groups[number] = group
        self._actors.append(actor)
        actor.request_host()

    def _end(self, actor: RayProcess, wanted: int) -> None:
        say(f"the learner needs only {wanted} actors: ending {actor.name}")
        if actor.is_running:
            actor.leaves_by = time.monotonic() + GOODBYE_SECONDS
            actor.stop()
        else:
            self.remove(actor)
