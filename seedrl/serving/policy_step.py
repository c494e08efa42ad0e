"""One step of the policy, as the device does it: forward, sample, record. Knows nothing of requests or sessions."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.columns import Columns
from seedrl.serving.slots import Slots
from seedrl.serving.staging import Staged
from seedrl.types import ModelInput, ModelOutput, Observation

Forward = Callable[[ModelInput, Tensor], tuple[ModelOutput, Tensor]]  # of the policies that act in some rows [N, ...]


class Kind(NamedTuple):
    """The parts of a step that only some runs need."""

    explores: bool  # some rows are drawn from other logits than the policy's
    has_greedy: bool  # some rows take the most likely action


class Computed(NamedTuple):
    """The results of a step."""

    action: Tensor  # [N, ...]
    output: ModelOutput
    core_state: Tensor  # [N, S]  before the rows
    next_core_state: Tensor  # [N, S]


class PolicyStep:
    """Owned by the server thread."""

    def __init__(self, actions: Actions, slots: Slots, columns: Columns) -> None:
        self._actions = actions
        self._slots = slots
        self._columns = columns

    def compute(
        self, forward: Forward, staged: Staged, observation: Observation, noise: Tensor, kind: Kind
    ) -> Computed:
        """Run the policy on the rows and draw actions with the noise; without noise the most likely one is chosen."""
        inputs = ModelInput(observation, staged.reward, staged.last_action, staged.reset)
        core_state = self._slots.core_state(staged.slots)
        output, next_core_state = forward(inputs, core_state)
        if kind.explores:
            output = output._replace(logits=self._explored(output.logits, staged.exploration))
        if kind.has_greedy:
            noise = noise.masked_fill(staged.exploration[3].bool().unsqueeze(-1), 0.0)
        return Computed(self._actions.choose(output.logits, noise), output, core_state, next_core_state)

    def keep(self, staged: Staged, computed: Computed) -> None:
        """Write what the model made of the rows to the store and the slots."""
        self._columns.write_output(staged.at, computed.output)
        if staged.core_places:
            self._columns.keep_core_state(staged.core_places, computed.core_state)
            self._slots.keep_core_state(staged.slots, computed.next_core_state)

    def _explored(self, logits: Tensor, exploration: Tensor) -> Tensor:
        """Return the logits that actions are really drawn from, so that those are recorded."""
        temperature, epsilon, explores, _ = exploration
        explored = self._actions.explored(logits, temperature, epsilon)
        return torch.where(explores.bool().unsqueeze(-1), explored, logits)


def run_model(model: nn.Module, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
    """Run a model on one row of each slot [N, ...]."""
    output, core_state = model(inputs.tree_map(lambda tensor: tensor.unsqueeze(0)), core_state)
    return ModelOutput(output.logits.squeeze(0), output.value.squeeze(0)), core_state
