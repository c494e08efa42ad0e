"""Plays episodes with a trained policy, one environment, the likeliest action each time. Records and shows nothing."""

from collections import deque
from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from envs_server.pool import Pool, make_pool
from seedrl.config import EnvConfig
from seedrl.errors import ConfigError
from seedrl.rows import ENDED, RESET, Rows
from seedrl.specs import Arrays, as_tree, leaves, rows_of, tree_map
from seedrl.trained.load import Trained
from seedrl.trained.step import StepInputs, StepOutputs, first_inputs, following
from seedrl.types import Observation
from seedrl.wire.messages import Welcome


class Moment(NamedTuple):
    """One step of an episode, as it is seen before the next action."""

    episode: int
    step: int  # 0 is the first observation
    reward: float  # for arriving here
    is_last: bool
    observation: Arrays  # [1, ...]  the newest frame
    frame: NDArray[Any] | None  # as the environment draws itself; None where it does not


def job_of(env: EnvConfig, seed: int) -> Welcome:
    """One of these environments."""
    return Welcome(0, env.id, env.options, 1, 1, seed, env.processes, env.wrappers)


def play(trained: Trained, job: Welcome, episodes: int, max_steps: int) -> Iterator[Moment]:
    """Every moment of so many episodes. After one that is cut short at `max_steps` the environment is made anew."""
    begun = 0
    while begun < episodes:
        with closing(make_pool(job._replace(seed=job.seed + begun), threads=1)) as pool:
            if pool.spec != trained.spec:
                raise ConfigError(f"{job.env_id} has {pool.spec} here, and the policy was trained on {trained.spec}")
            for moment in _moments(trained, pool, begun, max_steps):
                yield moment
                begun = moment.episode + 1
                if moment.is_last and begun == episodes:
                    return


def _moments(trained: Trained, pool: Pool, episode: int, max_steps: int) -> Iterator[Moment]:
    """From this episode on, until one is cut short."""
    policy, stack = trained.policy, Stack(trained.config.env.frame_stack)
    before: tuple[StepInputs, StepOutputs] | None = None
    step = 0
    while step < max_steps:
        rows = pool.recv()
        begins, ends = bool(rows.flags[0] & RESET), bool(rows.flags[0] & ENDED)
        step = 0 if begins else step + 1
        yield _moment(episode, step, rows, ends or step == max_steps, pool)
        observation = stack.add(rows.observation, begins)
        if before is None or begins:
            inputs = first_inputs(policy, observation, rows=1)
        else:
            inputs = following(*before, observation, torch.from_numpy(rows.reward))
        before = (inputs, policy.step(inputs))
        pool.send(tree_map(lambda leaf: leaf.numpy(), before[1].action), rows.env_id)
        if ends:
            episode, step = episode + 1, 0


def _moment(episode: int, step: int, rows: Rows, is_last: bool, pool: Pool) -> Moment:
    frame = pool.render() if hasattr(pool, "render") else None
    return Moment(episode, step, float(rows.reward[0]), is_last, rows_of(rows.observation, 0, 1), frame)


class Stack:
    """The newest frames of one environment, as the learner's store stacks them."""

    def __init__(self, frames: int) -> None:
        self._frames: deque[list[NDArray[Any]]] = deque(maxlen=frames)

    def add(self, observation: Arrays, begins: bool) -> Observation:
        """One frame more; before the first one of an episode there is the first one."""
        newest = [np.array(leaf) for leaf in leaves(observation)]
        if begins:
            self._frames.extend([newest] * (self._frames.maxlen or 1))
        else:
            self._frames.append(newest)
        return as_tree(
            observation, [torch.from_numpy(self._joined(column)) for column in zip(*self._frames, strict=True)]
        )

    def _joined(self, frames: tuple[NDArray[Any], ...]) -> NDArray[Any]:
        if len(frames) == 1:
            return frames[0]
        return np.concatenate([frame.reshape(1, *(frame.shape[1:] or (1,))) for frame in frames], axis=1)
