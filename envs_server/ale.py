"""Atari games by ale-py's own vector environments, a light pool beside envpool. Knows nothing of streams.

`env.id=ale:pong` needs the package ale-py alone, which is there for more systems than envpool. Games have ALE's names,
in lower case with underscores: `ale:space_invaders`.
"""

from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs_server.spaces import ActionSpace, ObservationSpace, spec_of
from seedrl.errors import ConfigError
from seedrl.rows import ENDED, LIFE, RESET, TERMINATED, TRUNCATED, Rows
from seedrl.sizes import available_cores
from seedrl.specs import Arrays
from seedrl.wire.messages import Welcome

ALE = "ale"
DEFAULTS = {"stack_num": 1, "reward_clipping": False}  # the learner stacks frames and clips rewards


def is_ale(env_id: str) -> bool:
    return env_id.startswith(f"{ALE}:")


class Group:
    """Games that step together. Owned by the thread that receives until their rows are sent, then by the other one."""

    def __init__(self, env_id: NDArray[np.int32], envs: Any, seeds: NDArray[np.int64]) -> None:
        self.env_id = env_id
        self.envs = envs
        self._first, info = envs.reset(seed=seeds)
        self._received = info["env_id"]  # the order in which games were received last, and in which they get actions
        self._begins = np.zeros(len(env_id), np.uint8)  # RESET, and LIFE, where the next row begins an episode

    def send(self, action: Any) -> None:
        self.envs.send(action[self._received])

    def recv(self, observations: ObservationSpace) -> Rows:
        count = len(self.env_id)
        if self._first is not None:
            rows, self._first = observations.rows(self._first, count), None
            return Rows(self.env_id, rows, np.zeros(count, np.float32), np.full(count, RESET, np.uint8))
        observation, reward, terminated, truncated, info = self.envs.recv()
        self._received = info["env_id"]
        order = np.argsort(self._received)
        rewards = np.where(self._begins, 0, reward[order]).astype(np.float32)
        flags = self._begins
        flags[terminated[order]] |= TERMINATED
        flags[(truncated & ~terminated)[order]] |= TRUNCATED
        flags[(terminated & (info["lives"] > 0))[order]] |= LIFE  # with episodic_life; the game continues
        self._begins = np.where(flags & ENDED, RESET | (flags & LIFE), 0).astype(np.uint8)
        return Rows(self.env_id, observations.rows(observation[order], count), rewards, flags)


class AlePool:
    """One vector environment per group; `recv` and `send` may be called from two threads.

    ale-py gives actions to the games that were received last, so several groups cannot share one. Groups are received
    in the order in which they were sent.
    """

    def __init__(self, job: Welcome, threads: int) -> None:
        seeds = (np.random.SeedSequence(job.seed).generate_state(job.num_envs) >> 2).astype(np.int64)
        all_ids = np.arange(job.num_envs, dtype=np.int32).reshape(-1, job.group_size)
        made = [_make(job, threads or available_cores()) for _ in all_ids]
        space, actions = made[0].single_observation_space, made[0].single_action_space
        self.spec = spec_of(space, actions, job.env_id)
        self._observations, self._actions = ObservationSpace(space), ActionSpace(actions)
        self._groups = [Group(ids, envs, seeds[ids]) for ids, envs in zip(all_ids, made, strict=True)]
        self._stepping: SimpleQueue[Group] = SimpleQueue()
        for group in self._groups:
            self._stepping.put(group)

    def recv(self) -> Rows:
        return self._stepping.get().recv(self._observations)

    def send(self, action: Arrays, env_id: NDArray[np.int32]) -> None:
        group = self._groups[int(env_id[0]) // len(env_id)]
        group.send(self._actions.nested(action))
        self._stepping.put(group)

    def close(self) -> None:
        for group in self._groups:
            group.envs.close()


def _make(job: Welcome, threads: int) -> Any:
    try:
        from ale_py import roms
        from ale_py.vector_env import AtariVectorEnv
    except ImportError as error:
        raise ConfigError(f"env.id={job.env_id} needs ale-py: pip install 'seedrl[{ALE}]'") from error
    game, known = job.env_id.partition(":")[2], roms.get_all_rom_ids()
    if game not in known:
        raise ConfigError(f"env.id={job.env_id}: ale-py has no such game; it has {', '.join(sorted(known))}")
    options = {"num_threads": threads, **DEFAULTS, **job.options}
    try:
        return AtariVectorEnv(game, job.group_size, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"ale-py cannot make {game} with {options}: {error}") from error
