"""An environment that costs nothing: what is left of a run with it is the infrastructure. Knows nothing of streams."""

import time
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seedrl.errors import ConfigError
from seedrl.rows import ENDED, RESET, TERMINATED, Rows
from seedrl.specs import DTYPES, Arrays, ArraySpec, EnvSpec, discrete
from seedrl.wire.messages import Welcome

MOCK = "mock"
DEFAULTS: dict[str, Any] = {
    "shape": [1, 84, 84],
    "dtype": "uint8",
    "num_actions": 6,
    "episode_length": 1000,
    "step_seconds": 0.0,
}


class MockPool:
    """Observations are noise made once, rewards 1, episodes all of one length.

    Options: shape, dtype, num_actions, episode_length, step_seconds (that a step of a group takes, one after another,
    and no core). `recv` and `send` may be called from two threads.
    """

    def __init__(self, job: Welcome) -> None:
        self.job = job
        options = {**DEFAULTS, **job.options}
        observation = ArraySpec(tuple(options["shape"]), options["dtype"])
        self.spec = EnvSpec(observation, discrete(options["num_actions"]))
        if options.keys() > DEFAULTS.keys() or options["dtype"] not in DTYPES:
            raise ConfigError(f"env.options={job.options}: {MOCK} takes {', '.join(DEFAULTS)}")
        self._observation = _noise(observation, job)
        self._step_seconds = float(options["step_seconds"])
        self._episode_length = int(options["episode_length"])
        self._row = np.zeros(job.num_envs, np.int64)  # of the episode; 0 is the reset row
        groups = np.arange(job.num_envs, dtype=np.int32).reshape(-1, job.group_size)
        self._done_stepping = deque(groups)

    def recv(self) -> Rows:
        if self._step_seconds:
            time.sleep(self._step_seconds)
        env_id = self._done_stepping.popleft()
        row = self._row[env_id]
        flags = np.where(row == 0, RESET, np.where(row == self._episode_length, TERMINATED, 0)).astype(np.uint8)
        self._row[env_id] = np.where(flags & ENDED, 0, row + 1)
        return Rows(env_id, self._observation, (row > 0).astype(np.float32), flags)

    def send(self, action: Arrays, env_id: NDArray[np.int32]) -> None:
        self._done_stepping.append(env_id)

    def close(self) -> None:
        pass


def _noise(spec: ArraySpec, job: Welcome) -> NDArray[Any]:
    noise = np.random.default_rng(job.seed).integers(0, 255, (job.group_size, *spec.shape))
    return noise.astype(spec.dtype)
