"""An actor that measures how long its requests wait for their actions: `python -m bench.probe ADDRESS SECONDS PAUSE`.

PAUSE is the time the environments of a group take to step; the last line it prints is JSON.
"""

import json
import sys
import threading
import time

import numpy as np
from numpy.typing import NDArray

from envs_server.actor import Actor
from envs_server.mock import MockPool
from envs_server.pool import Pool
from seedrl.rows import Rows
from seedrl.specs import Arrays
from seedrl.wire.messages import Welcome

WARM_UP = 1.0


class TimedPool(MockPool):
    """Notes when rows leave and when their actions come; a group takes `pause` seconds to step."""

    def __init__(self, job: Welcome, pause: float) -> None:
        super().__init__(job)
        self._pause = pause
        self._ready_at: dict[int, float] = {}
        self._left_at: dict[int, float] = {}
        self.waits: list[float] = []

    def recv(self) -> Rows:
        rows = super().recv()
        group = int(rows.env_id[0])
        time.sleep(max(0.0, self._ready_at.get(group, 0.0) - time.perf_counter()))
        self._left_at[group] = time.perf_counter()
        return rows

    def send(self, action: Arrays, env_id: NDArray[np.int32]) -> None:
        group, now = int(env_id[0]), time.perf_counter()
        self.waits.append(now - self._left_at[group])
        self._ready_at[group] = now + self._pause
        super().send(action, env_id)


def main(address: str, seconds: float, pause: float) -> None:
    pools: list[TimedPool] = []

    def make(job: Welcome, _: int) -> Pool:
        pools.append(TimedPool(job, pause))
        return pools[-1]

    actor = Actor(address, name="probe", make_pool=make, say=lambda text: None)
    thread = threading.Thread(target=actor.run, name="actor", daemon=True)
    thread.start()
    while not (pools and pools[0].waits):
        time.sleep(0.01)
    time.sleep(WARM_UP)
    pools[0].waits.clear()
    time.sleep(seconds)
    waits = 1e3 * np.array(pools[0].waits)
    actor.stop()
    thread.join(10)
    p50, p99 = np.quantile(waits, [0.5, 0.99])
    print(
        json.dumps({"requests": len(waits), "p50 ms": float(p50), "p99 ms": float(p99), "max ms": float(waits.max())})
    )


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
