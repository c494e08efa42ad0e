"""The tensor bundles inside the learner: T+1 rows per unroll, B unrolls per train batch, N rows per batch.

A row is one step: what the environment returned and what the policy did. Knows nothing of where tensors come from.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from seedrl.specs import ArraySpec, as_tree, leaves, tree_map

Observation = Tensor | dict[str, Tensor]  # a tree: a plain tensor if the environment's observation is a plain array


def stack_frames(frames: Tensor, spec: ArraySpec) -> Tensor:
    """Join frames [N, frame_stack, ...] of a leaf to the stacks [N, ...] of `spec.stacked(frame_stack)`.

    This is a view, and free, unless the channels are the last axis.
    """
    shape = spec.stacked(frames.shape[1]).shape
    return frames.movedim(1, 1 + spec.channel_axis).reshape(-1, *shape)


class ModelInput(NamedTuple):
    """The input of a model, time-major. Inference uses T+1 = 1."""

    observation: Observation  # a tree of [T+1, B, frame_stack * C, ...]  the environment's dtypes
    reward: Tensor  # [T+1, B]  float32, received on arriving at this observation
    last_action: Tensor  # [T+1, B, ...]  as in Unrolls; 0 on reset rows
    reset: Tensor  # [T+1, B]  bool, first row of an episode: core_state is zeroed before it

    def tree_map(self, function: Callable[[Tensor], Tensor]) -> "ModelInput":
        """Apply a function to every tensor."""
        observation, *others = self
        return ModelInput(tree_map(function, observation), *map(function, others))


class ModelOutput(NamedTuple):
    logits: Tensor  # [T+1, B, P]  parameters of the distribution of actions; see seedrl/actions.py
    value: Tensor  # [T+1, B]
    aux: dict[str, Tensor] | None = None  # [T+1, B] or [] each  further losses; see seedrl/algorithms/auxiliary.py


class Recorded(NamedTuple):
    """Finished unrolls without their observations, for the priorities that they have before they are trained on."""

    reward: Tensor  # [T+1, B]
    terminated: Tensor  # [T+1, B]  bool
    truncated: Tensor  # [T+1, B]  bool
    action: Tensor  # [T+1, B, ...]
    behavior_logits: Tensor  # [T+1, B, P]
    behavior_value: Tensor  # [T+1, B]


class Ticket(NamedTuple):
    """The identity of unrolls in the store. It outlives them: an entry that holds another unroll by now is known."""

    entry: NDArray[np.int64]  # [B]
    generation: NDArray[np.int64]  # [B]  how many unrolls the entry has held before


class Unrolls(NamedTuple):
    """A train batch. Row t holds observation x_t, the reward for arriving there, and the action a_t taken there."""

    inputs: ModelInput
    terminated: Tensor  # [T+1, B]  bool
    truncated: Tensor  # [T+1, B]  bool
    action: Tensor  # [T+1, B, ...]  int64 [] for a single choice; see seedrl/actions.py for all others
    behavior_logits: Tensor  # [T+1, B, P]
    behavior_value: Tensor  # [T+1, B]
    core_state: Tensor  # [B, S]  before row 0
    weight: Tensor  # [B]  importance weight of each unroll in the loss; 1 unless the store samples by priority
    policy_version: NDArray[np.int64]  # [T+1, B]  of the weights that chose the action; on the host
    ticket: Ticket  # on the host

    @property
    def columns(self) -> int:
        """Return the number of unrolls, B."""
        return self.terminated.shape[1]

    def select(self, columns: Tensor) -> "Unrolls":
        """Return some of the unrolls; `columns` are their numbers, on the host."""
        here, host = columns.to(self.terminated.device), columns.numpy()
        return Unrolls(
            self.inputs.tree_map(lambda tensor: tensor.index_select(1, here)),
            terminated=self.terminated.index_select(1, here),
            truncated=self.truncated.index_select(1, here),
            action=self.action.index_select(1, here),
            behavior_logits=self.behavior_logits.index_select(1, here),
            behavior_value=self.behavior_value.index_select(1, here),
            core_state=self.core_state.index_select(0, here),
            weight=self.weight.index_select(0, here),
            policy_version=self.policy_version[:, host],
            ticket=Ticket(*(number[host] for number in self.ticket)),
        )

    def rows_from(self, row: int, core_state: Tensor) -> "Unrolls":
        """Return the same unrolls without the rows before this one; `core_state` is the one before it."""
        return Unrolls(
            self.inputs.tree_map(lambda tensor: tensor[row:]),
            terminated=self.terminated[row:],
            truncated=self.truncated[row:],
            action=self.action[row:],
            behavior_logits=self.behavior_logits[row:],
            behavior_value=self.behavior_value[row:],
            core_state=core_state,
            weight=self.weight,
            policy_version=self.policy_version[row:],
            ticket=self.ticket,
        )

    def tree_map(self, function: Callable[[Tensor], Tensor]) -> "Unrolls":
        """Apply a function to every tensor on the device."""
        tensors = [function(tensor) for tensor in self.tensors()]
        return Unrolls.of_tensors(self.inputs.observation, tensors, self.policy_version, self.ticket)

    def tensors(self) -> list[Tensor]:
        """Return every tensor on the device, always in the same order."""
        observation, *inputs = self.inputs
        return [*leaves(observation), *inputs, *self[1:8]]

    @classmethod
    def of_tensors(
        cls, shape: Any, tensors: Sequence[Tensor], policy_version: NDArray[np.int64], ticket: Ticket
    ) -> "Unrolls":
        """Return unrolls of tensors in the order of `tensors`; `shape` is a tree with the names of observations."""
        count = len(leaves(shape))
        inputs = ModelInput(as_tree(shape, tensors[:count]), *tensors[count : count + 3])
        return cls._make((inputs, *tensors[count + 3 :], policy_version, ticket))
