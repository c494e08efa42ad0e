"""A Ray cluster: connecting to it, what its nodes have, and room reserved there. Knows no process of a job."""

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
from seedrl.launching.bundles import GIB, Layout
from seedrl.launching.placement import Node

POLL_SECONDS = 0.2
PATIENCE_SECONDS = 10.0  # until it is said that Ray has found no place yet
OBJECT_STORE_BYTES = 100 * 2**20  # of a Ray of our own: nothing is put there


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
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


def addresses() -> set[str]:
    """Of the machines: nodes of one machine share an address."""
    return {node["NodeManagerAddress"] for node in alive()}


def as_node(node: dict[str, Any]) -> Node:
    """What it has in all: Ray queues a job that has to wait for others to end."""
    resources = node["Resources"]
    return Node(
        name_of(node),
        cpus=resources.get("CPU", 0.0),
        gpus=resources.get("GPU", 0.0),
        memory_gb=resources.get("memory", 0.0) / GIB,
        labels=frozenset(node.get("Labels", {}).items()),
    )


def name_of(node: dict[str, Any]) -> str:
    """For people; several nodes may have one address."""
    return f"{node['NodeName']}-{node['NodeID'][:6]}"


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
                say("the cluster is large enough, but others use it; waiting for room")
                is_told = True
        yield group
    finally:
        remove_placement_group(group)


def show(decided: Layout, group: PlacementGroup) -> None:
    """Who is placed where."""
    names = {node["NodeID"]: name_of(node) for node in alive()}
    nodes = placement_group_table(group).get("bundles_to_node_id", {})
    placed = [
        (names.get(nodes.get(index, ""), "a new node"), process.name)
        for index, bundle in enumerate(decided.bundles)
        for process in bundle.places
    ]
    for node, members in groupby(sorted(placed), lambda each: each[0]):
        say(f"{', '.join(name for _, name in members)} on {node}")


def say(words: str) -> None:
    print(f"ray: {words}", file=sys.stderr, flush=True)
