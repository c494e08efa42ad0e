"""Runs a trained policy in some environments: what `record` plays with. Knows nothing of environments or files.

The policy sees what it saw in training: the newest frames stacked, its last action, the reward, and its core_state.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seedrl.specs import Arrays, EnvSpec, as_tree, leaves, tree_map
from seedrl.trained.step import StepInputs, StepPolicy
from seedrl.types import Observation, stack_frames


class Player:
    """Chooses the most likely actions for `rows` environments. Owned by the thread that calls it."""

    def __init__(self, policy: StepPolicy, spec: EnvSpec, frame_stack: int, rows: int) -> None:
        """`spec` is the one of single frames."""
        self._policy = policy
        self._stack = FrameStack(spec, frame_stack, rows)
        actions = policy.actions
        self._last_action = torch.zeros(rows, *actions.shape, dtype=getattr(torch, actions.dtype.name))
        self._core_state = torch.zeros(rows, policy.core_size)

    def act(self, observation: Arrays, reward: NDArray[np.float32], reset: NDArray[np.bool_]) -> Arrays:
        """Return the actions for the newest observations [N, ...]; `reset` is true where an episode begins."""
        begins = torch.tensor(reset)
        inputs = StepInputs(
            observation=self._stack.add(tree_map(_tensor, observation), begins),
            reward=torch.tensor(reward).masked_fill(begins, 0),
            last_action=self._last_action.masked_fill(_beside(begins, self._last_action), 0),
            reset=begins,
            core_state=self._core_state,  # the model itself zeroes it where an episode begins
        )
        outputs = self._policy.step(inputs)
        self._last_action, self._core_state = outputs.next_last_action, outputs.next_core_state
        return tree_map(lambda leaf: leaf.numpy(), outputs.action)


class FrameStack:
    """The newest frames of some environments. An episode begins with as many copies of its first frame."""

    def __init__(self, spec: EnvSpec, frames: int, rows: int) -> None:
        self._spec = spec
        self._frames = [
            torch.zeros(rows, frames, *leaf.shape, dtype=getattr(torch, leaf.dtype)) for leaf in spec.observations
        ]

    def add(self, observation: Observation, reset: Tensor) -> Observation:
        """Take in the newest frame of every environment and return their stacks, oldest frame first."""
        pairs = zip(self._frames, leaves(observation), strict=True)
        self._frames = [_shifted(frames, newest.unsqueeze(1), reset) for frames, newest in pairs]
        stacked = map(stack_frames, self._frames, self._spec.observations)
        return as_tree(self._spec.observation, list(stacked))


def _shifted(frames: Tensor, newest: Tensor, reset: Tensor) -> Tensor:
    """Drop the oldest frame for the newest one, which replaces all of them where an episode begins."""
    shifted = torch.cat([frames[:, 1:], newest], dim=1)
    return torch.where(_beside(reset, shifted), newest, shifted)


def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.tensor(array)  # a copy: the environments may write to their arrays again


def _beside(rows: Tensor, others: Tensor) -> Tensor:
    """Give a column [N] as many axes as another tensor [N, ...] has."""
    return rows.view(-1, *[1] * (others.dim() - 1))
