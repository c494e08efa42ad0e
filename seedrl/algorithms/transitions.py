"""From rows to transitions. All shifts of time happen here. Pure; knows nothing of any loss.

Row t of an unroll holds x_t, the reward for *arriving* at x_t, and a_t. So the transition t → t+1 has action a_t,
reward r_{t+1}, and ends the episode if row t+1 is terminated or truncated.

The environments reset on the step after an end: its action is ignored and it leads from the last observation of one
episode to the first of the next. That is no transition, so row t is *invalid* where it is itself an end.
    terminated at t+1   discount 0: nothing is bootstrapped.
    truncated at t+1    discount stays: bootstrap from V(x_{t+1}), the true final observation, whose row is invalid.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.types import Unrolls


class Transitions(NamedTuple):
    """The T transitions of B unrolls, each [T, B]."""

    valid_t: Tensor  # bool, false where t → t+1 is no transition of the environment
    action_t: Tensor
    reward_tp1: Tensor  # as trained on
    discount_tp1: Tensor  # 0 where x_{t+1} is terminal
    weight_t: Tensor  # of each transition in a mean over the valid ones, importance weights included


def transitions(unrolls: Unrolls, config: AlgorithmConfig) -> Transitions:
    """Return the transitions of a train batch."""
    valid_t = valid_transitions(unrolls, config)
    return Transitions(
        valid_t=valid_t,
        action_t=unrolls.action[:-1],
        reward_tp1=shaped_reward(unrolls.inputs.reward[1:], config),
        discount_tp1=config.discount * (~unrolls.terminated[1:]).float(),
        weight_t=valid_t.float() / valid_t.sum().clamp(min=1) * unrolls.weight,
    )


def valid_transitions(unrolls: Unrolls, config: AlgorithmConfig) -> Tensor:
    """Return which transitions [T, B] do not start at an end; on policy, only those of the newest policy.

    The action of an unroll's first row was chosen before the update that followed the unroll before.
    """
    valid = ~(unrolls.terminated | unrolls.truncated)[:-1]
    if not config.on_policy:
        return valid
    version = unrolls.policy_version[:-1]
    return valid & torch.from_numpy(version == version.max()).to(valid.device)


def shaped_reward(reward: Tensor, config: AlgorithmConfig) -> Tensor:
    """Scale and clip the reward for training; episode returns in reports stay raw."""
    reward = reward * config.reward_scale
    return reward.clamp(-config.reward_clip, config.reward_clip) if config.reward_clip > 0 else reward


def linear(start: float, end: float | None, fraction: float) -> float:
    """Return `start` at fraction 0 and `end` from fraction 1 on; without an end it stays constant."""
    if end is None:
        return start
    return start + (end - start) * min(max(fraction, 0.0), 1.0)


def entropy_cost_at(config: AlgorithmConfig, fraction: float) -> float:
    """Return the weight of the entropy bonus; it is resolved by now."""
    assert config.entropy_cost is not None
    return linear(config.entropy_cost, config.entropy_cost_end, fraction)
