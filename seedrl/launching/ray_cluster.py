"""A Ray cluster: the connection to it, its nodes, and room reserved there. Knows nothing of a job's processes."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from seedrl.errors import ConfigError
from seedrl.launching.placement import Node
from seedrl.launching.ray_reservation import GIB, Reservation

POLL_SECONDS = 0.2
PATIENCE_SECONDS = 10.0  # until a message says that Ray has found no place yet
OBJECT_STORE_BYTES = 100 * 2**20  # of a cluster started here, as small as Ray allows: it is not used


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a cluster, or to a new one on this machine that ends with this block."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # such as those of hosts that are lost while they stop
    own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, **({} if address else own))
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"launch.address={address}: Ray reports: {str(error).strip().splitlines()[0]}") from error
    try:
        yield
    finally:
        ray.shutdown()


def alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def addresses() -> set[str]:
    """Return the addresses of the machines; nodes on one machine share an address."""
    return {node["NodeManagerAddress"] for node in alive()}


def as_node(node: dict[str, Any]) -> Node:
    """Return all resources of a node, used or not: Ray queues a job that has to wait for others to end."""
    resources = node["Resources"]
    return Node(
        name_of(node),
        cpus=resources.get("CPU", 0.0),
        gpus=resources.get("GPU", 0.0),
        memory_gb=resources.get("memory", 0.0) / GIB,
        labels=frozenset(node.get("Labels", {}).items()),
    )


def name_of(node: dict[str, Any]) -> str:
    """Return a name to show; several nodes may share an address."""
    return f"{node['NodeName']}-{node['NodeID'][:6]}"


@contextlib.contextmanager
def reserved(reservation: Reservation, name: str, is_called_off: Callable[[], bool]) -> Iterator[PlacementGroup]:
    """Reserve room for all processes at once; wait until the cluster has it."""
    group = placement_group(
        [bundle.resources for bundle in reservation.bundles],
        strategy=reservation.strategy,
        name=name,
        bundle_label_selector=[bundle.labels for bundle in reservation.bundles],
    )
    try:
        began, is_reported = time.monotonic(), False
        while not group.wait(POLL_SECONDS) and not is_called_off():
            if not is_reported and time.monotonic() > began + PATIENCE_SECONDS:
                say("the cluster is large enough but in use; waiting for room")
                is_reported = True
        yield group
    finally:
        remove_placement_group(group)


def show(reservation: Reservation, group: PlacementGroup) -> None:
    """Print which process is placed on which node."""
    names = {node["NodeID"]: name_of(node) for node in alive()}
    nodes = placement_group_table(group).get("bundles_to_node_id", {})
    placed = [
        (names.get(nodes.get(index, ""), "a new node"), process.name)
        for index, bundle in enumerate(reservation.bundles)
        for process in bundle.places
    ]
    for node, members in groupby(sorted(placed), lambda each: each[0]):
        say(f"{', '.join(name for _, name in members)} on {node}")


def say(words: str) -> None:
    print(f"ray: {words}", file=sys.stderr, flush=True)
