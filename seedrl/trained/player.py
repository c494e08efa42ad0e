"""Runs a trained policy in some environments, for `seedrl record` and `seedrl.load`. Knows no environments or files.

The policy sees what it saw in training: the newest frames stacked, its last action, the reward, and its core_state.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seedrl.actions import Actions
from seedrl.serving.seats import ON_POLICY, Exploration
from seedrl.specs import Arrays, EnvSpec, as_tree, leaves, tree_map
from seedrl.trained.step import StepInputs, StepPolicy
from seedrl.types import Observation, stack_frames

CPU = torch.device("cpu")


class Player:
    """Chooses actions for `rows` environments, the most likely ones or by chance. Owned by the thread that calls it."""

    def __init__(
        self, policy: StepPolicy, spec: EnvSpec, frame_stack: int, rows: int, chance: "Chance | None" = None
    ) -> None:
        """`spec` is the one of single frames; without `chance` the most likely actions are chosen."""
        self._policy = policy
        self._chance = chance
        self._device = next(iter([*policy.parameters(), *policy.buffers()]), torch.empty(0)).device
        self._stack = FrameStack(spec, frame_stack, rows, self._device)
        dtype = getattr(torch, policy.actions.dtype.name)
        self._last_action = torch.zeros(rows, *policy.actions.shape, dtype=dtype, device=self._device)
        self._core_state = torch.zeros(rows, policy.core_size, device=self._device)

    @torch.no_grad()
    def act(self, observation: Arrays, reward: NDArray[np.float32], reset: NDArray[np.bool_]) -> Arrays:
        """Return the actions for the newest observations [N, ...]; `reset` is true where an episode begins."""
        begins = self._upload(reset)
        inputs = StepInputs(
            observation=self._stack.add(tree_map(self._upload, observation), begins),
            reward=self._upload(reward).masked_fill(begins, 0),
            last_action=self._last_action.masked_fill(_beside(begins, self._last_action), 0),
            reset=begins,
            core_state=self._core_state,  # the model itself zeroes it where an episode begins
        )
        logits, _, self._core_state = self._policy.evaluate(inputs)
        self._last_action = self._choose(logits)
        action: Arrays = self._policy.actions.to_env(self._last_action.cpu().numpy())
        return action

    def _choose(self, logits: Tensor) -> Tensor:
        actions = self._policy.actions
        if self._chance is None:
            return actions.choose(logits, logits.new_zeros(len(logits), actions.noise_size))
        return self._chance.choose(actions, logits)

    def _upload(self, array: NDArray[Any]) -> Tensor:
        return torch.tensor(array, device=self._device)  # a copy: the environments may write to their arrays again


@dataclass(frozen=True)
class Chance:
    """Draws actions as in training: at the end of its schedule of exploration."""

    exploration: Exploration
    generator: torch.Generator

    def choose(self, actions: Actions, logits: Tensor) -> Tensor:
        noise = actions.noise(len(logits), self.generator)
        if self.exploration == ON_POLICY:
            return actions.choose(logits, noise)
        temperature, epsilon = (torch.full_like(logits[:, 0], value) for value in self.exploration)
        return actions.choose(actions.explored(logits, temperature, epsilon), noise)


class FrameStack:
    """The newest frames of some environments. An episode begins with as many copies of its first frame."""

    def __init__(self, spec: EnvSpec, frames: int, rows: int, device: torch.device = CPU) -> None:
        self._spec = spec
        self._frames = [
            torch.zeros(rows, frames, *leaf.shape, dtype=getattr(torch, leaf.dtype), device=device)
            for leaf in spec.observations
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


def _beside(rows: Tensor, others: Tensor) -> Tensor:
    """Give a column [N] as many axes as another tensor [N, ...] has."""
    return rows.view(-1, *[1] * (others.dim() - 1))
