"""Environments reduced to `spec`, `recv` and `send`. Knows nothing of streams.

The only module that knows envpool. A pool steps many environments at once; `recv` returns the next group that is done
stepping, `send` gives a group its actions. The first row of an environment and the row after an end carry RESET.
"""

import difflib
import importlib
import warnings
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from envs_server import spaces
from envs_server.counting import COUNTING, CountingPool
from envs_server.gym import GymPool, MakeEnv
from envs_server.mock import MOCK, MockPool
from seedrl.errors import ConfigError
from seedrl.specs import Arrays, ArraySpec, EnvSpec
from seedrl.wire.codec import ENDED, RESET, TERMINATED, TRUNCATED, Job, Rows


class Pool(Protocol):
    spec: EnvSpec

    def recv(self) -> Rows:
        """The next group of rows; waits for the environments. Only while a group is stepping."""
        ...

    def send(self, action: Arrays, env_id: NDArray[np.int32]) -> None:
        """Actions for a group received before; they take effect in the background."""
        ...

    def close(self) -> None: ...


def make_pool(job: Job, threads: int, make_env: MakeEnv | None = None) -> Pool:
    """The pool a Welcome asks for, or one of environments that `make_env` makes."""
    pool = _bare_pool(job, threads, make_env)
    for path in job.wrappers:
        pool = _wrapped(pool, path)
    return pool


def _bare_pool(job: Job, threads: int, make_env: MakeEnv | None) -> Pool:
    if make_env is not None or ":" in job.env_id:
        return GymPool(job, threads, make_env)
    if job.env_id == MOCK:
        return MockPool(job)
    return CountingPool(job) if job.env_id == COUNTING else EnvPool(job, threads)


def _wrapped(pool: Pool, path: str) -> Pool:
    module, _, name = path.partition(":")
    try:
        wrapped: Pool = getattr(importlib.import_module(module), name)(pool)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"env.wrappers: {path} could not be put around {pool.spec}: {error}") from error
    return wrapped


class Wrapper:
    """A pool around a pool; yours overrides what it changes, and `spec` if observations look different then.

    class Brightness(Wrapper):
        def __init__(self, pool):
            super().__init__(pool)
            self.spec = EnvSpec(ArraySpec((1,), "float32"), pool.spec.action)

        def observation(self, observation):  # of many environments at once, [n, ...]
            return observation.mean(axis=(1, 2, 3), keepdims=False, dtype="float32")[:, None]
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.spec = pool.spec

    def observation(self, observation: Arrays) -> Arrays:
        return observation

    def action(self, action: Arrays) -> Arrays:
        return action

    def recv(self) -> Rows:
        rows = self.pool.recv()
        return rows._replace(observation=self.observation(rows.observation))

    def send(self, action: Arrays, env_id: NDArray[np.int32]) -> None:
        self.pool.send(self.action(action), env_id)

    def render(self) -> NDArray[Any] | None:
        return self.pool.render() if hasattr(self.pool, "render") else None

    def close(self) -> None:
        self.pool.close()


class EnvPool:
    """envpool, asynchronous if groups are smaller than the pool. `recv` and `send` may be called from two threads."""

    def __init__(self, job: Job, threads: int) -> None:
        with warnings.catch_warnings():  # envpool builds its spaces on first use, and warns then
            warnings.filterwarnings("ignore", message=".*precision lowered by casting.*")
            self._envs = _make(job, threads)
            self._observation_space, self._action_space = self._envs.observation_space, self._envs.action_space
            self.spec = spaces.spec_of(self._observation_space, self._action_space, job.env_id)
        if job.keep:
            self.spec = EnvSpec(_kept(self.spec.observation, job.keep), self.spec.action)
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
        rows = spaces.observed(observation, self._observation_space, len(env_id))
        if self._keep:
            assert not isinstance(rows, dict)
            rows = np.ascontiguousarray(rows[:, self._keep])
        return Rows(env_id, rows, reward.astype(np.float32, copy=False), flags)

    def send(self, action: Arrays, env_id: NDArray[np.int32]) -> None:
        self._envs.send(spaces.chosen(action, self._action_space), env_id)

    def render(self) -> NDArray[Any] | None:
        """The first environment as people see it, if it was made with render_mode=rgb_array; only between steps."""
        frames = self._envs.render(env_ids=[0]) if self._envs.render_mode else None
        return None if frames is None else np.asarray(frames[0])

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
        raise ConfigError(
            f"env.id={job.env_id!r} is not an envpool environment{hint}; others are gymnasium:ID or your.module:make"
        )
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


def _kept(observation: ArraySpec | dict[str, ArraySpec], keep: list[int]) -> ArraySpec:
    if isinstance(observation, dict) or len(observation.shape) != 1 or max(keep) >= observation.shape[0]:
        raise ConfigError(f"env.keep={keep} does not fit observations of {observation}")
    return ArraySpec((len(keep),), observation.dtype)
