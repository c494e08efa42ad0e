"""The part of a Ray cluster that a job reserves: the bundles of its placement group and their strategy. Imports no Ray.

A bundle, in Ray's terms, is a set of resources on one machine. Here each process has its own, so that after the loss
of a machine each finds room wherever there is some. Only where processes must stay together or apart does a bundle hold
all processes that `placement.place` has put on one machine.

    setting       a bundle holds  strategy
    (none)        one process     PACK           few machines, more if need be
    spread        one process     SPREAD         many machines, fewer if need be
    collocate     one process     STRICT_PACK    one machine, if all ranks are on one; else
                  one machine     PACK, SPREAD   each rank with its actors
    per_node      one machine     STRICT_SPREAD  each on a machine of its own, so that no further actors come there
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from seedrl.config import Placement, RoleConfig, RunConfig
from seedrl.errors import ConfigError
from seedrl.launching.placement import LEARNER, PlacedProcess

GIB = 2**30


class Bundle(NamedTuple):
    """The resources that one or more processes need of the machine they share."""

    resources: dict[str, float]
    labels: dict[str, str]
    places: tuple[PlacedProcess, ...]


class Reservation(NamedTuple):
    """The placement group of a job."""

    strategy: str
    bundles: tuple[Bundle, ...]


def plan_reservation(config: RunConfig, places: Sequence[PlacedProcess]) -> Reservation:
    placement = config.launch.placement
    machines = [tuple(group) for _, group in groupby(places, lambda place: place.node)]
    strategy = "SPREAD" if Placement.spread in placement else "PACK"
    groups: Iterable[tuple[PlacedProcess, ...]] = [(place,) for place in places]
    if config.launch.per_node:
        strategy, groups = "STRICT_SPREAD", machines
    elif Placement.collocate in placement and len(machines) == 1:
        strategy = "STRICT_PACK"
    elif Placement.collocate in placement:
        groups = machines
    return Reservation(strategy, tuple(bundle_of(config, group) for group in groups))


def role_of(config: RunConfig, place: PlacedProcess) -> RoleConfig:
    return config.launch.learner if place.role == LEARNER else config.launch.actor


def resources_of(role: RoleConfig) -> dict[str, float]:
    """Return the resources of a role by Ray's names."""
    return dict(_resources(role))


def _resources(role: RoleConfig) -> Iterator[tuple[str, float]]:
    for name, amount in (("CPU", role.cpus), ("GPU", role.gpus), ("memory", int(role.memory_gb * GIB))):
        if amount:
            yield name, amount


def bundle_of(config: RunConfig, places: tuple[PlacedProcess, ...]) -> Bundle:
    resources: dict[str, float] = {}
    labels: dict[str, str] = {}
    for place in places:
        role = role_of(config, place)
        needed = resources_of(role)
        if not needed:
            raise ConfigError(
                f"launch.{place.role} needs no resource, and Ray places nothing without one: give it cpus"
            )
        resources |= {name: resources.get(name, 0) + amount for name, amount in needed.items()}
        labels |= role.selector
    return Bundle(resources, labels, places)
