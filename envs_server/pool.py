"""Environments reduced to `spec`, `recv` and `send`. Knows nothing of streams.

The only module that knows envpool. A pool steps many environments at once; `recv` returns the next group that is done
stepping, `send` gives a group its actions. The first row of an environment and the row after an end carry RESET.
"""

import difflib
import warnings
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from envs_server.counting import COUNTING, CountingPool
from envs_server.mock import MOCK, MockPool
from seedrl.errors import ConfigError
from seedrl.specs import ArraySpec, EnvSpec
from seedrl.wire.codec import ENDED, RESET, TERMINATED, TRUNCATED, Job, Rows


class Pool(Protocol):
    spec: EnvSpec

    def recv(self) -> Rows:
        """The next group of rows; waits for the environments. Only while a group is stepping."""
        ...

    def send(self, action: NDArray[np.int32], env_id: NDArray[np.int32]) -> None:
        """Actions for a group received before; they take effect in the background."""
        ...

    def close(self) -> None: ...


def make_pool(job: Job, threads: int) -> Pool:
    """The pool a Welcome asks for."""
    if job.env_id == MOCK:
        return MockPool(job)
    return CountingPool(job) if job.env_id == COUNTING else EnvPool(job, threads)


class EnvPool:
    """envpool, asynchronous if groups are smaller than the pool. `recv` and `send` may be called from two threads."""

    def __init__(self, job: Job, threads: int) -> None:
        with warnings.catch_warnings():  # envpool builds its spaces on first use, and warns then
            warnings.filterwarnings("ignore", message=".*precision lowered by casting.*")
            self._envs = _make(job, threads)
            self.spec = _spec(self._envs, job)
        self._keep = job.keep
        self._begins = np.ones(job.num_envs, np.bool_)  # the next row of this environment begins an episode
        self._envs.async_reset()

    def recv(self) -> Rows:
        observation, reward, terminated, truncated, info = self._envs.recv()
        env_id = info["env_id"]
        flags = np.where(self._begins[env_id], RESET, 0).astype(np.uint8)
        flags[terminated] |= TERMINATED
        flags[truncated & ~terminated] |= TRUNCATED
        self._begins[env_id] = (flags & ENDED) != 0
        if self._keep:
            observation = np.ascontiguousarray(observation[:, self._keep])
        return Rows(env_id, observation, reward.astype(np.float32, copy=False), flags)

    def send(self, action: NDArray[np.int32], env_id: NDArray[np.int32]) -> None:
        self._envs.send(action, env_id)

    def close(self) -> None:
        self._envs.close()


def _make(job: Job, threads: int) -> Any:
    try:
        import envpool
    except ImportError as error:
        raise ConfigError("this machine steps environments and needs envpool: pip install 'seedrl[actor]'") from error
    known = envpool.list_all_envs()
    if job.env_id not in known:
        near = difflib.get_close_matches(job.env_id, [*known, MOCK], n=3, cutoff=0.5)
        hint = f"; did you mean {', '.join(near)}?" if near else ""
        raise ConfigError(f"env.id={job.env_id!r} is not an envpool environment{hint}")
    options = {"num_threads": threads, **job.options}
    try:
        return envpool.make(
            job.env_id,
            env_type="gymnasium",
            num_envs=job.num_envs,
            batch_size=job.group_size,
            seed=job.seed,
            **options,
        )
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"envpool cannot make {job.env_id} with {options}: {error}") from error


def _spec(envs: Any, job: Job) -> EnvSpec:
    observation, action = envs.observation_space, envs.action_space
    shape = getattr(observation, "shape", None)
    if not shape or observation.dtype is None:
        raise ConfigError(f"{job.env_id} has observations of {observation}; only arrays are supported")
    if not hasattr(action, "n"):
        raise ConfigError(f"{job.env_id} has actions of {action}; only discrete actions are supported")
    if job.keep:
        if len(shape) != 1 or max(job.keep) >= shape[0]:
            raise ConfigError(f"env.keep={job.keep} does not fit observations of shape {list(shape)}")
        shape = (len(job.keep),)
    return EnvSpec(ArraySpec(tuple(int(size) for size in shape), observation.dtype.name), int(action.n))
