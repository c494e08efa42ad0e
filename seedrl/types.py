"""The tensor bundles inside the learner: T+1 rows per unroll, B unrolls per train batch, N rows per batch.

A row is one step: what the environment returned and what the policy did. Knows nothing of where tensors come from.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from seedrl.specs import tree_map

Observation = Tensor | dict[str, Tensor]  # a tree: a plain tensor if the environment's observation is a plain array


class ModelInput(NamedTuple):
    """What a model sees, time-major. Inference uses T+1 = 1."""

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


class Unrolls(NamedTuple):
    """A train batch. Row t holds observation x_t, the reward for arriving there, and the action a_t taken there."""

    inputs: ModelInput
    terminated: Tensor  # [T+1, B]  bool
    truncated: Tensor  # [T+1, B]  bool
    action: Tensor  # [T+1, B, ...]  int64 [] for a single choice; see seedrl/actions.py for all others
    behavior_logits: Tensor  # [T+1, B, P]
    behavior_value: Tensor  # [T+1, B]
    policy_version: NDArray[np.int64]  # [T+1, B]  of the weights that chose the action; on the host
    core_state: Tensor  # [B, S]  before row 0
