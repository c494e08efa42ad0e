"""The actor-critic loss of one train batch. Pure; knows nothing of optimisers, stores or threads.

All shifts of time happen here. Row t of an unroll holds x_t, the reward for *arriving* at x_t, and a_t. So the
transition t → t+1 has action a_t, reward r_{t+1}, and ends the episode if row t+1 is terminated or truncated.

The environments reset on the step after an end: its action is ignored and it leads from the last observation of one
episode to the first of the next. That is no transition, so row t is *invalid* where it is itself an end.
    terminated at t+1   discount 0: nothing is bootstrapped.
    truncated at t+1    discount stays: bootstrap from V(x_{t+1}), the true final observation, whose row is invalid.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from seedrl.actions import Actions
from seedrl.config import AlgorithmConfig
from seedrl.learning.vtrace import vtrace
from seedrl.types import ModelOutput, Unrolls


class LossParts(NamedTuple):
    """Scalars on the device, averaged over valid transitions."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    clipped_rho: Tensor  # share of importance weights above rho_bar
    kl: Tensor  # behavior ‖ target, for the actions taken
    target_mean: Tensor  # of the value targets
    target_square: Tensor  # their mean square


def vtrace_loss(
    unrolls: Unrolls,
    output: ModelOutput,
    actions: Actions,
    config: AlgorithmConfig,
    entropy_cost: float,
    unit: Tensor | float = 1.0,
) -> LossParts:
    """`unit` is what advantages and errors of values are measured in."""
    valid_t = valid_transitions(unrolls)
    action_t = unrolls.action[:-1]
    log_prob_t = actions.log_prob(output.logits[:-1], action_t)
    log_rho_t = log_prob_t.detach() - actions.log_prob(unrolls.behavior_logits[:-1], action_t)

    targets = vtrace(
        log_rho_t=log_rho_t,
        reward_tp1=shaped_reward(unrolls.inputs.reward[1:], config),
        discount_tp1=config.discount * (~unrolls.terminated[1:]).float(),
        value=output.value.detach(),
        valid_t=valid_t,
        rho_bar=config.rho_bar,
        c_bar=config.c_bar,
        pg_rho_bar=config.pg_rho_bar,
        trace_lambda=config.trace_lambda,
    )

    weight = valid_t.float() / valid_t.sum().clamp(min=1)  # sums to 1 over valid transitions
    policy = -(weight * targets.pg_advantage / unit * log_prob_t).sum()
    value = 0.5 * (weight * ((targets.vs - output.value[:-1]) / unit).square()).sum()
    entropy = (weight * actions.entropy(output.logits[:-1])).sum()
    total = policy + config.value_cost * value - entropy_cost * entropy
    with torch.no_grad():
        clipped_rho = (weight * (log_rho_t.exp() > config.rho_bar).float()).sum()
        kl = -(weight * log_rho_t).sum()
        target_mean, target_square = (weight * targets.vs).sum(), (weight * targets.vs.square()).sum()
    return LossParts(total, policy, value, entropy, clipped_rho, kl, target_mean, target_square)


def valid_transitions(unrolls: Unrolls) -> Tensor:
    """Which of the transitions [T, B] count: those that do not start at an end."""
    return ~(unrolls.terminated | unrolls.truncated)[:-1]


def shaped_reward(reward: Tensor, config: AlgorithmConfig) -> Tensor:
    """The reward as trained on; episode returns in reports stay raw."""
    reward = reward * config.reward_scale
    return reward.clamp(-config.reward_clip, config.reward_clip) if config.reward_clip > 0 else reward
