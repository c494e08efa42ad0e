"""C10: actors that connect, stream and are killed, over and over, leave nothing behind in the learner.

CYCLES=10000 in the environment for as many as promised.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from envs_server.mock import MockPool
from seedrl.wire import codec
from tests.chaos.cluster import Cluster, Resources, Setup, resources, wait_until
from tests.chaos.counting import NUM_ACTIONS, SIGNATURE, counting
from tests.chaos.proxy import Proxy
from tests.fakes import make_spec
from tests.integration.support import RawActor

CYCLES = int(os.environ.get("CYCLES", "1000"))
WARM_UP = 100  # of the cycles
STEPS = 3  # requests of a cycle
GROWTH = 20 * 2**20  # bytes, promised
SPEC = make_spec((SIGNATURE,), "int32", NUM_ACTIONS)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster with one actor that is left undisturbed."""
    with Cluster(tmp_path, Setup(actors=1, envs=4, spare=8)) as cluster:
        wait_until(cluster.all_stream, "the actor streams")
        yield cluster


def cycle(address: str, lost: Proxy | None) -> None:
    """Joins, streams, and is gone: by a cut connection, or by a cancelled call if there is nothing to cut."""
    with RawActor(lost.address if lost else address) as actor:
        pool = counting(MockPool(actor.join(SPEC, name="cycling")))
        for request_id in range(1, STEPS + 1):
            rows = pool.recv()
            actor.send(codec.encode_step(request_id, rows))
            action = codec.decode_act(actor.receive().act, SPEC, len(rows.env_id))
            pool.send(np.asarray(action, np.int32), rows.env_id)
        actor.send(codec.encode_step(STEPS + 1, pool.recv()))  # nobody will take the answer
        if lost:
            lost.cut()


@pytest.mark.chaos
@pytest.mark.timeout(60 + CYCLES)
def test_cycles_of_connect_stream_and_kill_leave_nothing_behind(cluster: Cluster) -> None:
    pid = cluster.learner.pid
    first = resources(pid)
    with Proxy(cluster.address) as proxy:
        for number in range(WARM_UP):
            cycle(cluster.address, proxy if number % 2 else None)
        warm, began, updates = resources(pid), time.monotonic(), cluster.updates()
        for number in range(CYCLES):
            cycle(cluster.address, proxy if number % 2 else None)
        seconds = time.monotonic() - began
    went_on = cluster.updates() - updates

    def is_settled() -> bool:
        now = resources(pid)
        return now.descriptors <= first.descriptors and now.threads <= first.threads

    wait_until(is_settled, f"descriptors and threads as at first: {first}, now {resources(pid)}", seconds=30)
    last = resources(pid)
    print(summary(warm, last, seconds, went_on))
    assert last.rss - warm.rss <= GROWTH
    assert cluster.learner_numbers()["seedrl_sessions_joined_total"] >= WARM_UP + CYCLES + 1
    assert went_on > 0
    assert cluster.stop() == []
    assert cluster.violations() == []


def summary(warm: Resources, last: Resources, seconds: float, updates: float) -> str:
    growth = (last.rss - warm.rss) / 2**20
    return (
        f"{CYCLES} cycles in {seconds:.0f} s: RSS {growth:+.1f} MiB, {last.descriptors} descriptors, "
        f"{last.threads} threads; meanwhile the other actor got {updates:.0f} updates"
    )
