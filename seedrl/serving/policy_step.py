"""One step of the policy, as the device does it: forward, sample, record. Knows nothing of requests or sessions."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.columns import Columns, RowIndices
from seedrl.serving.slots import Slots
from seedrl.serving.staging import Observed, Staged
from seedrl.types import ModelInput, ModelOutput, Observation

Forward = Callable[[ModelInput, Tensor], tuple[ModelOutput, Tensor]]  # of the policies that act in some rows [N, ...]


class Kind(NamedTuple):
    """The parts of a step that only some runs need."""

    explores: bool  # some rows are drawn from other logits than the policy's
    has_greedy: bool  # some rows take the most likely action

    def includes(self, other: "Kind") -> bool:
        """Return whether a step of this kind does for the other one; what no row needs changes none."""
        return self.joined(other) == self

    def joined(self, other: "Kind") -> "Kind":
        return Kind(self.explores or other.explores, self.has_greedy or other.has_greedy)


class Inputs(NamedTuple):
    """Everything that a step needs, on the device."""

    staged: Staged
    observed: Observed
    noise: Tensor  # [N, ...]


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

    def run(self, forward: Forward, inputs: Inputs, kind: Kind) -> Tensor:
        """Do all of a step; return the actions."""
        computed = self.compute(forward, inputs, kind)
        self.keep(inputs.staged, computed)
        return computed.action

    def compute(self, forward: Forward, inputs: Inputs, kind: Kind) -> Computed:
        """Run the policy on the rows and draw actions with the noise; without noise the most likely one is chosen."""
        staged, observed, noise = inputs
        observation = self._observation(staged.at, observed)
        core_state = self._slots.core_state(staged.slots)
        output, next_core_state = forward(
            ModelInput(observation, staged.reward, staged.last_action, staged.reset), core_state
        )
        if kind.explores:
            output = output._replace(logits=self._explored(output.logits, staged.exploration))
        if kind.has_greedy:
            noise = noise.masked_fill(staged.exploration[3].bool().unsqueeze(-1), 0.0)
        return Computed(self._actions.choose(output.logits, noise), output, core_state, next_core_state)

    def keep(self, staged: Staged, computed: Computed) -> None:
        """Write what the model made of the rows to the store and the slots."""
        self._columns.write_output(staged.at, computed.output)
        if staged.core_entries:
            self._columns.keep_core_state(staged.core_entries, computed.core_state)
            self._slots.keep_core_state(staged.slots, computed.next_core_state)

    def _observation(self, at: RowIndices, observed: Observed) -> Observation:
        """Return the stacked observations [N, ...]; write them to the store, if they are not there yet."""
        if observed.stacks is not None:
            return observed.stacks
        self._columns.scatter_frames(at.frame, observed.frames)
        if self._columns.frame_stack == 1:
            return self._columns.as_observation(observed.frames)
        return self._columns.stacks(at)

    def _explored(self, logits: Tensor, exploration: Tensor) -> Tensor:
        """Return the logits that actions are really drawn from, so that those are recorded."""
        temperature, epsilon, explores, _ = exploration
        explored = self._actions.explored(logits, temperature, epsilon)
        return torch.where(explores.bool().unsqueeze(-1), explored, logits)


def run_model(model: nn.Module, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
    """Run a model on one row of each slot [N, ...]."""
    output, core_state = model(inputs.tree_map(lambda tensor: tensor.unsqueeze(0)), core_state)
    return ModelOutput(output.logits.squeeze(0), output.value.squeeze(0)), core_state
