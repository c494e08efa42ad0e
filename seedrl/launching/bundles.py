"""What is reserved of a Ray cluster for a job: the bundles of its placement group, and how they lie. Imports no Ray.

A bundle is one process, so that after the loss of a machine each finds room wherever there is some. Only where
processes must stay together or apart is it all that `placement.place` has put on one machine.

    placement     bundles     strategy
    (none)        processes   PACK           few machines, more if need be
    spread        processes   SPREAD         many machines, fewer if need be
    collocate     processes   STRICT_PACK    one machine, if the ranks are all on one; else
                  machines    PACK, SPREAD   each rank with its actors
    per_node      machines    STRICT_SPREAD  each on a machine of its own, so that no more actors come there
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from seedrl.config import Placement, RoleConfig, RunConfig
from seedrl.errors import ConfigError
from seedrl.launching.placement import LEARNER, Place

GIB = 2**30


class Bundle(NamedTuple):
    """What one or more processes need of the machine they share."""

    resources: dict[str, float]
    labels: dict[str, str]
    places: tuple[Place, ...]


class Layout(NamedTuple):
    strategy: str
    bundles: tuple[Bundle, ...]


def layout(config: RunConfig, places: Sequence[Place]) -> Layout:
    placement = config.launch.placement
    machines = [tuple(group) for _, group in groupby(places, lambda place: place.node)]
    strategy = "SPREAD" if Placement.spread in placement else "PACK"
    groups: Iterable[tuple[Place, ...]] = [(place,) for place in places]
    if config.launch.per_node:
        strategy, groups = "STRICT_SPREAD", machines
    elif Placement.collocate in placement and len(machines) == 1:
        strategy = "STRICT_PACK"
    elif Placement.collocate in placement:
        groups = machines
    return Layout(strategy, tuple(bundle_of(config, group) for group in groups))


def role_of(config: RunConfig, place: Place) -> RoleConfig:
    return config.launch.learner if place.role == LEARNER else config.launch.actor


def resources_of(role: RoleConfig) -> dict[str, float]:
    """In Ray's words."""
    return dict(_resources(role))


def _resources(role: RoleConfig) -> Iterator[tuple[str, float]]:
    for name, amount in (("CPU", role.cpus), ("GPU", role.gpus), ("memory", int(role.memory_gb * GIB))):
        if amount:
            yield name, amount


def bundle_of(config: RunConfig, places: tuple[Place, ...]) -> Bundle:
    resources: dict[str, float] = {}
    labels: dict[str, str] = {}
    for place in places:
        role = role_of(config, place)
        needed = resources_of(role)
        if not needed:
            raise ConfigError(f"launch.{place.role} asks for nothing, and Ray places nothing without a resource")
        resources |= {name: resources.get(name, 0) + amount for name, amount in needed.items()}
        labels |= role.selector
    return Bundle(resources, labels, places)
