"""One step of a trained policy for many environments at once: what is exported, and what plays. Nothing is random.

Everything a step needs goes in and everything the next one needs comes out, so that whoever calls it keeps the state:

    observation        the tree the environment gave, each leaf [B, frame_stack * C, ...], oldest frame first
    reward             [B]  float32, for arriving there; 0 where an episode begins
    last_action        [B, ...]  `next_last_action` of the step before; 0 where an episode begins
    reset              [B]  bool, an episode begins here
    core_state         [B, S]  float32, `next_core_state` of the step before; S is 0 for a policy without memory

    action             the tree to give the environment, each leaf [B, ...]: the likeliest
    logits             [B, P]  see seedrl/actions.py
    value              [B]
    next_core_state    [B, S]
    next_last_action   [B, ...]  the action as the policy remembers it, before it is brought within bounds
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.models.base import core_size_of
from seedrl.specs import CategoricalSpec, ContinuousSpec, EnvSpec, as_tree, leaves, names
from seedrl.types import ModelInput, Observation

OUTPUTS = ("action", "logits", "value", "next_core_state", "next_last_action")


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
    """A model whose weights do not change any more, with its actions. `spec` has its frames stacked."""

    def __init__(self, model: nn.Module, spec: EnvSpec, squash: bool) -> None:
        super().__init__()
        self.spec = spec
        self.actions = Actions(spec, squash)
        self.core_size = core_size_of(model)
        self.model = model
        self.told = Told(spec, squash)
        self.requires_grad_(False).eval()

    def forward(
        self, observation: Observation, reward: Tensor, last_action: Tensor, reset: Tensor, core_state: Tensor
    ) -> dict[str, Any]:
        """By name; `OUTPUTS` has the order."""
        inputs = ModelInput(observation, reward, last_action, reset).tree_map(lambda leaf: leaf.unsqueeze(0))
        output, next_core_state = self.model(inputs, core_state)
        logits, value = output.logits.squeeze(0), output.value.squeeze(0)
        action = self.actions.choose(logits, logits.new_zeros(logits.shape[0], self.actions.noise_size))
        if not self.core_size:  # something of its own: an exported graph must not give an input back
            next_core_state = value.unsqueeze(-1)[:, :0]
        return dict(zip(OUTPUTS, (self.told(action), logits, value, next_core_state, action), strict=True))

    @torch.no_grad()
    def step(self, inputs: StepInputs) -> StepOutputs:
        return StepOutputs(**self(**inputs._asdict()))


class Told(nn.Module):
    """`Actions.told` in torch: the tree of actions that environments get of what was recorded, [B, ...]."""

    def __init__(self, spec: EnvSpec, squash: bool) -> None:
        super().__init__()
        self._shape = spec.action
        self.parts = nn.ModuleList(
            Gaussian(leaf, squash) if isinstance(leaf, ContinuousSpec) else Categorical(leaf) for leaf in spec.actions
        )

    def forward(self, action: Tensor) -> Observation:
        rows = action.unsqueeze(-1) if action.dim() == 1 else action
        found, at = [], 0
        for part in self.parts:
            width = part.width
            assert isinstance(width, int)
            found.append(part(rows[:, at : at + width]))
            at += width
        return as_tree(self._shape, found)


class Categorical(nn.Module):
    def __init__(self, spec: CategoricalSpec) -> None:
        super().__init__()
        self.width = len(spec.sizes)
        self._shape = spec.shape

    def forward(self, entries: Tensor) -> Tensor:
        return entries.to(torch.int32).reshape(-1, *self._shape)


class Gaussian(nn.Module):
    bounded: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, spec: ContinuousSpec, squash: bool) -> None:
        super().__init__()
        self.width = len(spec.low)
        self._shape, self._squash = spec.shape, squash
        low, high = torch.tensor(spec.low), torch.tensor(spec.high)
        self.register_buffer("bounded", low.isfinite() & high.isfinite(), persistent=False)
        self.register_buffer("low", low, persistent=False)
        self.register_buffer("high", high, persistent=False)

    def forward(self, entries: Tensor) -> Tensor:
        unit = entries.tanh() if self._squash else entries.clamp(-1, 1)
        low, high = (torch.where(self.bounded, bound, 0.0) for bound in (self.low, self.high))
        amount = torch.where(self.bounded, (high + low) / 2 + (high - low) / 2 * unit, entries)
        return amount.clamp(self.low, self.high).reshape(-1, *self._shape)


def first_inputs(policy: StepPolicy, observation: Observation, rows: int) -> StepInputs:
    """Of episodes that begin with these observations."""
    return StepInputs(
        observation,
        reward=torch.zeros(rows),
        last_action=torch.zeros(rows, *policy.actions.shape, dtype=getattr(torch, policy.actions.dtype.name)),
        reset=torch.ones(rows, dtype=torch.bool),
        core_state=torch.zeros(rows, policy.core_size),
    )


def following(inputs: StepInputs, outputs: StepOutputs, observation: Observation, reward: Tensor) -> StepInputs:
    """Of the step after one, no episode having begun."""
    return StepInputs(
        observation,
        reward,
        outputs.next_last_action,
        torch.zeros_like(inputs.reset),
        outputs.next_core_state,
    )


def flat(trees: dict[str, Any]) -> dict[str, Any]:
    """By the names that a file of one level has: "reward", "observation", or "observation/camera/left"."""
    return {
        f"{name}/{leaf}" if leaf else name: values
        for name, tree in trees.items()
        for leaf, values in zip(names(tree), leaves(tree), strict=True)
    }
