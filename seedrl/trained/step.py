"""One step of a trained policy for many environments at once, without randomness: what `export` writes to a file.

The step keeps no state. Everything it needs is an input, and everything the next step needs is an output:

    observation        the tree of observations, each leaf [B, frame_stack * C, ...], oldest frame first
    reward             [B]  float32, received on arriving there; 0 where an episode begins
    last_action        [B, ...]  `next_last_action` of the previous step; 0 where an episode begins
    reset              [B]  bool, whether an episode begins here
    core_state         [B, S]  float32, `next_core_state` of the previous step; S is 0 without a recurrent core

    action             the tree of actions for the environment, each leaf [B, ...]: the most likely ones
    logits             [B, P]  the parameters of the policy's distribution, see seedrl/actions.py
    value              [B]
    next_core_state    [B, S]
    next_last_action   [B, ...]  the action as it is recorded, before it is brought within bounds

`Player` in seedrl/trained/player.py keeps the state between steps.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.models.base import core_size_of
from seedrl.specs import EnvSpec, leaves, names
from seedrl.types import ModelInput, Observation


class StepInputs(NamedTuple):
    observation: Observation
    reward: Tensor
    last_action: Tensor
    reset: Tensor
    core_state: Tensor


class StepOutputs(NamedTuple):
    action: Observation
    logits: Tensor
    value: Tensor
    next_core_state: Tensor
    next_last_action: Tensor


class StepPolicy(nn.Module):
    """A model with fixed weights, and the distribution of its actions. `spec` is the one with stacked frames."""

    def __init__(self, model: nn.Module, spec: EnvSpec, squash: bool) -> None:
        super().__init__()
        self.spec = spec
        self.actions = Actions(spec, squash)
        self.core_size = core_size_of(model)
        self.model = model
        self.requires_grad_(False).eval()

    def forward(
        self, observation: Observation, reward: Tensor, last_action: Tensor, reset: Tensor, core_state: Tensor
    ) -> dict[str, Any]:
        """Return the fields of StepOutputs by name, in their order."""
        inputs = StepInputs(observation, reward, last_action, reset, core_state)
        logits, value, next_core_state = self.evaluate(inputs)
        action = self.actions.choose(logits, logits.new_zeros(logits.shape[0], self.actions.noise_size))
        if not self.core_size:  # an exported graph must not return one of its inputs
            next_core_state = value.unsqueeze(-1)[:, :0]
        return StepOutputs(self.actions.to_env(action), logits, value, next_core_state, action)._asdict()

    def evaluate(self, inputs: StepInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits, values and the next core_state, without choosing actions."""
        seen = ModelInput(inputs.observation, inputs.reward, inputs.last_action, inputs.reset)
        output, next_core_state = self.model(seen.tree_map(lambda leaf: leaf.unsqueeze(0)), inputs.core_state)
        return output.logits.squeeze(0), output.value.squeeze(0), next_core_state

    @torch.no_grad()
    def step(self, inputs: StepInputs) -> StepOutputs:
        return StepOutputs(**self(**inputs._asdict()))


def flat(trees: dict[str, Any]) -> dict[str, Any]:
    """Flatten trees to one level, as files have it: "reward", "observation", or "observation/camera/left"."""
    return {
        f"{name}/{leaf}" if leaf else name: values
        for name, tree in trees.items()
        for leaf, values in zip(names(tree), leaves(tree), strict=True)
    }
