"""Environments reduced to `spec`, `recv` and `send`. Knows nothing of streams.

The only module that knows envpool. A pool steps many environments at once; `recv` returns the next group that is done
stepping, `send` gives a group its actions. The first row of an environment and the row after an end carry RESET.
A pool may have `abandon()` as well: called while a thread hangs in `recv`, it brings that thread back.
"""

import difflib
import warnings
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from envs_server.ale import AlePool, is_ale
from envs_server.board_games import LEGAL, TURN, BoardGamePool
from envs_server.doom import EngineDirectory
from envs_server.gym import GymPool
from envs_server.mock import MOCK, MockPool
from envs_server.spaces import ActionSpace, ObservationSpace, spec_of
from envs_server.stepping import MakeEnv
from seedrl.errors import ConfigError
from seedrl.plugins import OWN, build, is_import_path, is_own
from seedrl.rows import ENDED, LIFE, RESET, TERMINATED, TRUNCATED, Rows
from seedrl.specs import Arrays, EnvSpec
from seedrl.wire.messages import Welcome


class Pool(Protocol):
    spec: EnvSpec

    def recv(self) -> Rows:
        """Wait for the next group and return its rows. Call it only while a group is stepping."""
        ...

    def send(self, action: Arrays, env_id: NDArray[np.int32]) -> None:
        """Send actions to a group that was received before; they take effect in the background."""
        ...

    def close(self) -> None: ...


def make_pool(job: Welcome, threads: int, make_env: MakeEnv | None = None) -> Pool:
    """Return the pool that a Welcome asks for; `make_env` makes the environments if they are the actor's own."""
    pool = _bare_pool(job, threads, make_env)
    try:
        for path in job.wrappers:
            pool = _wrapped(pool, path)
    except BaseException:
        pool.close()
        raise
    return pool


def _bare_pool(job: Welcome, threads: int, make_env: MakeEnv | None) -> Pool:
    if is_own(job.env_id):
        if make_env is None:
            raise ConfigError(
                f"the learner has env.id={job.env_id}: its actors bring the environment, and this one has none; "
                "start it from Python as Actor(address, make_env).run()"
            )
        return GymPool(job, threads, make_env)
    if make_env is not None:
        raise ConfigError(
            f"this actor brings an environment, and the learner has env.id={job.env_id}; start it with env.id={OWN}"
        )
    if is_ale(job.env_id):
        return AlePool(job, threads)
    if ":" in job.env_id:
        return GymPool(job, threads)
    if job.env_id == MOCK:
        return MockPool(job)
    return EnvPool(job, threads) if job.players == 1 else _board_games(job, threads)


def _wrapped(pool: Pool, path: str) -> Pool:
    if not is_import_path(path):
        raise ConfigError(f"env.wrappers: expected your.module:Wrapper, saw {path}")
    wrapped: Pool = build("env.wrappers", path, pool)
    if not isinstance(getattr(wrapped, "spec", None), EnvSpec):
        raise ConfigError(f"env.wrappers={path} must have a `spec`, which envs_server.pool.Wrapper sets")
    return wrapped


class Wrapper:
    """A pool around a pool; yours overrides what it changes, and `spec` if observations look different then.

    class Brightness(Wrapper):
        def __init__(self, pool):
            super().__init__(pool)
            self.spec = EnvSpec(ArraySpec((1,), "float32"), pool.spec.action)

        def observation(self, observation):  # of many environments at once, [n, ...]
            return observation.mean(axis=(1, 2, 3), dtype="float32")[:, None]
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

    def abandon(self) -> None:
        abandon(self.pool)

    def close(self) -> None:
        self.pool.close()


def abandon(pool: Pool) -> None:
    """Let a thread that hangs in `recv` return, if the pool can do that."""
    getattr(pool, "abandon", lambda: None)()


class EnvPool:
    """envpool, asynchronous if groups are smaller than the pool. `recv` and `send` may be called from two threads."""

    def __init__(self, job: Welcome, threads: int) -> None:
        with warnings.catch_warnings():  # envpool builds its spaces on first use, and warns then
            warnings.filterwarnings("ignore", message=".*precision lowered by casting.*")
            self._engines = _engine_directory(job.env_id)
            if self._engines is not None:
                job = job._replace(options={"vzd_path": self._engines.vzd_path, **job.options})
            self._envs = _make(job, threads)
            observation, action = self._envs.observation_space, self._envs.action_space
            self.spec = spec_of(observation, action, job.env_id)
            self._observations, self._actions = ObservationSpace(observation), ActionSpace(action)
        self._begins = np.full(job.num_envs, RESET, np.uint8)  # flags of the next row of each environment
        self._has_lives = bool(job.options.get("episodic_life"))
        self._envs.async_reset()

    def recv(self) -> Rows:
        observation, reward, terminated, truncated, info = self._envs.recv()
        env_id = info["env_id"]
        flags = self._begins[env_id]
        # DeepMind Control has a reward for where an episode begins; nothing was done to earn it.
        earned = np.where(flags, 0, reward).astype(np.float32, copy=False)
        flags[terminated] |= TERMINATED
        flags[truncated & ~terminated] |= TRUNCATED
        begins = np.where(flags & ENDED, RESET, 0).astype(np.uint8)
        if self._has_lives:
            lost = terminated & (info["terminated"] == 0)  # which is 1 where the game is over
            flags[lost] |= LIFE
            begins[lost] |= LIFE
        self._begins[env_id] = begins
        return Rows(env_id, self._observations.rows(observation, len(env_id)), earned, flags)

    def send(self, action: Arrays, env_id: NDArray[np.int32]) -> None:
        self._envs.send(self._actions.nested(action), env_id)

    def render(self) -> NDArray[Any] | None:
        """Return a picture of the first environment, if it was made with render_mode=rgb_array; only between steps."""
        frames = self._envs.render(env_ids=[0]) if self._envs.render_mode else None
        return None if frames is None else np.asarray(frames[0])

    def close(self) -> None:
        self._envs.close()
        if self._engines is not None:
            self._engines.remove()


def _board_games(job: Welcome, threads: int) -> Pool:
    games = job.num_envs // job.players
    envs = _make(job._replace(num_envs=games, group_size=job.group_size // job.players), threads)
    return BoardGamePool(envs, job.env_id, games, job.players)


def _engine_directory(env_id: str) -> EngineDirectory | None:
    """Return a working directory for the engines of ViZDoom; None for every other environment."""
    try:
        from envpool.registration import registry
    except ImportError:  # `_make` explains it
        return None
    *_, defaults = registry.specs.get(env_id, ({},))
    return EngineDirectory(defaults["vzd_path"]) if "vzd_path" in defaults else None


def _make(job: Welcome, threads: int) -> Any:
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
        envs = envpool.make(
            job.env_id,
            env_type="gymnasium",
            num_envs=job.num_envs,
            batch_size=job.group_size,
            seed=job.seed,
            **options,
        )
    except (ImportError, TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"envpool cannot make {job.env_id} with {options}: {error}") from error
    _expect_players(envs.spec, job)
    return envs


def _expect_players(spec: Any, job: Welcome) -> None:
    """Raise ConfigError unless the environment has the players that the learner counts on, and they move in turn."""
    players = spec.config.max_num_players
    if players != job.players:
        raise ConfigError(f"{job.env_id} has {players} players, not {job.players}; set env.players={players}")
    if players > 1 and not {f"info:{LEGAL}", f"info:{TURN}"} <= set(spec._state_keys):
        raise ConfigError(
            f"{job.env_id} has {players} players who move at once: envpool's board games are supported, and your own "
            "simulators; see docs/self-play.md"
        )
