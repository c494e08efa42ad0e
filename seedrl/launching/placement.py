"""Assigns a machine to every process of a job, or refuses a job that fits nowhere, before anything is started.

Knows no engine: an engine provides the machines and carries out what is decided here.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from seedrl.config import Placement, RoleConfig, RunConfig
from seedrl.errors import ConfigError
from seedrl.validation import check_placement

LEARNER, ACTOR = "learner", "actor"
COUNTS = {LEARNER: "ranks.count", ACTOR: "actors.count"}  # the settings of how many there are
ROUNDING = 1e-6  # tolerance when fractions of an accelerator are added up


class Node(NamedTuple):
    """A machine and its resources."""

    name: str
    cpus: float
    gpus: float = 0.0
    memory_gb: float = math.inf
    labels: frozenset[tuple[str, str]] = frozenset()


class PlacedProcess(NamedTuple):
    """A process and the machine it goes to."""

    role: str
    number: int  # counted from 0 in each role
    node: str

    @property
    def name(self) -> str:
        """Return the name of the process; the first rank has no number."""
        return LEARNER if (self.role, self.number) == (LEARNER, 0) else f"{self.role}-{self.number}"


@dataclass
class _Room:
    """A machine while it is being filled."""

    node: Node
    cpus: float
    gpus: float
    memory_gb: float
    places: list[PlacedProcess] = field(default_factory=list)

    def count(self, role: str) -> int:
        return sum(place.role == role for place in self.places)

    def fits(self, role: RoleConfig) -> bool:
        has_labels = set(role.selector.items()) <= self.node.labels
        needs = ((role.cpus, self.cpus), (role.gpus, self.gpus), (role.memory_gb, self.memory_gb))
        return has_labels and all(need <= left + ROUNDING for need, left in needs)

    def take(self, place: PlacedProcess, role: RoleConfig) -> None:
        self.cpus -= role.cpus
        self.gpus -= role.gpus
        self.memory_gb -= role.memory_gb
        self.places.append(place)

    def __str__(self) -> str:
        gpus = f" and {self.gpus:g} accelerators" if self.node.gpus else ""
        there = ", ".join(f"{count} {role}s" for role in (LEARNER, ACTOR) if (count := self.count(role)))
        return f"{self.node.name} has {self.cpus:g} cores{gpus} left" + (f" beside {there}" if there else "")


def place(config: RunConfig, nodes: Sequence[Node]) -> list[PlacedProcess]:
    """Place ranks first, then actors, each on the first machine with room, or on the emptiest one with `spread`."""
    launch, per_node = config.launch, config.launch.per_node
    check_placement(config)
    rooms = [_Room(node, node.cpus, node.gpus, node.memory_gb) for node in nodes]
    spread = Placement.spread in launch.placement
    for number in range(config.ranks.count):
        _put(LEARNER, number, launch.learner, rooms, spread, "")
    hosts = [room for room in rooms if room.places] if Placement.collocate in launch.placement else rooms
    why = " beside a rank" if Placement.collocate in launch.placement else ""
    for number in range(config.actors.count):
        open_hosts = [room for room in hosts if not per_node or room.count(ACTOR) < per_node]
        limit = f", {per_node} on a machine" if per_node else ""
        _put(ACTOR, number, launch.actor, open_hosts, spread, why + limit, rooms)
    return [each for room in rooms for each in room.places]


def _put(
    name: str,
    number: int,
    role: RoleConfig,
    rooms: Sequence[_Room],
    spread: bool,
    conditions: str,
    every: Sequence[_Room] = (),
) -> None:
    fitting = [room for room in rooms if room.fits(role)]
    if not fitting:
        raise ConfigError(
            f"{name} {number} fits on no machine{conditions}: it needs {_words_of(role)}, and "
            f"{'; '.join(map(str, every or rooms)) or 'there is no machine'}. launch.{name}.cpus says what each needs, "
            f"and may be a fraction; {COUNTS[name]} says how many there are"
        )
    chosen = min(fitting, key=lambda room: room.count(name)) if spread else fitting[0]
    chosen.take(PlacedProcess(name, number, chosen.node.name), role)


def _words_of(role: RoleConfig) -> str:
    return ", ".join(_needs(role))


def _needs(role: RoleConfig) -> Iterator[str]:
    yield f"{role.cpus:g} cores"
    if role.gpus:
        yield f"{role.gpus:g} accelerators"
    if role.memory_gb:
        yield f"{role.memory_gb:g} GiB"
    yield from (f"the label {key}={value}" for key, value in role.selector.items())
