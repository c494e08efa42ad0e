"""Actors that a job on Ray has besides its first ones, as many as its learner could use (`actors.at_most`).

Each has a placement group of its own, so that room is taken when it comes and given back when it goes.
"""

import math
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from seedrl.config import RunConfig
from seedrl.launching.bundles import bundle_of
from seedrl.launching.hosted import Hosted
from seedrl.launching.local import FOLLOW_SECONDS, GOODBYE_SECONDS, wanted_actors
from seedrl.launching.placement import ACTOR, Place
from seedrl.launching.raycluster import say


class Growth:
    """Adds to the job's actors and takes from them. Owned by the driver."""

    def __init__(self, config: RunConfig, run_directory: str, actors: list[Hosted]) -> None:
        self._config = config
        self._run_directory = run_directory
        self._actors = actors
        self._rooms: dict[int, PlacementGroup] = {}  # of the actors from here, by number
        self._spent: set[int] = set()  # numbers that Ray restarts no more
        self._asked = -math.inf
        self._answer: Any = None  # awaited from the learner

    def follow(self, learner: Hosted) -> None:
        """Summons actors that the learner could use and sends away those it could do without, the newest first."""
        for actor in [actor for actor in self._actors if time.monotonic() > actor.leaves_by]:
            self.dismiss(actor)
        desired = self._desired(learner)
        if not desired:
            return
        wanted = wanted_actors(self._config, desired)
        staying = sorted((a for a in self._actors if a.leaves_by == math.inf), key=lambda actor: actor.number)
        free = set(range(self._config.actors.at_most)) - {actor.number for actor in self._actors} - self._spent
        for number in sorted(free)[: max(0, wanted - len(staying))]:
            self._summon(number, wanted)
        for actor in staying[wanted:]:
            self._send_away(actor, wanted)

    def dismiss(self, actor: Hosted) -> None:
        """It is gone, or is to be at once; its room is free again."""
        self._actors.remove(actor)
        self._free(actor.number)

    def give_up(self, actor: Hosted) -> None:
        """The same for good."""
        self._spent.add(actor.number)
        self.dismiss(actor)

    def end(self) -> None:
        for number in list(self._rooms):
            self._free(number)

    def _free(self, number: int) -> None:
        if number in self._rooms:
            remove_placement_group(self._rooms.pop(number))

    def _desired(self, learner: Hosted) -> int:
        """What the learner has answered by now; 0 if it has not, or cannot tell."""
        if self._answer is not None:
            if not ray.wait([self._answer], timeout=0)[0]:
                return 0
            answer, self._answer = self._answer, None
            try:
                return int(ray.get(answer))
            except RayError:  # its host is gone
                return 0
        if learner.is_running and time.monotonic() > self._asked + FOLLOW_SECONDS:
            self._asked = time.monotonic()
            self._answer = learner.desired_actors()
        return 0

    def _summon(self, number: int, wanted: int) -> None:
        place = Place(ACTOR, number, "")
        bundle = bundle_of(self._config, (place,))
        room = placement_group([bundle.resources], bundle_label_selector=[bundle.labels])
        actor = Hosted(self._config, place, room, 0, self._run_directory)
        say(f"the learner could use {wanted} actors: starting {actor.name}")
        self._rooms[number] = room
        self._actors.append(actor)
        actor.summon()

    def _send_away(self, actor: Hosted, wanted: int) -> None:
        say(f"the learner can do with {wanted} actors: ending {actor.name}")
        if actor.is_running:
            actor.leaves_by = time.monotonic() + GOODBYE_SECONDS
            actor.stop()
        else:
            self.dismiss(actor)
