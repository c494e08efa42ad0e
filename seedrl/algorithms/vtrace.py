"""V-trace actor-critic (IMPALA, Espeholt et al. 2018, arXiv:1802.01561). Knows nothing of optimisers or threads."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms.actor_critic import (
    RewardBound,
    actor_critic_loss,
    actor_critic_signs,
    clipped_share,
    divergence,
    explained_variance,
    normalized,
    target_moments,
)
from seedrl.algorithms.base import Forward, Loss
from seedrl.algorithms.minibatches import Minibatches
from seedrl.algorithms.recursion import decayed_sums
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.algorithms.signs import Sign
from seedrl.algorithms.transitions import entropy_cost_at, transitions, valid_transitions
from seedrl.models.base import popart_of
from seedrl.types import ModelOutput, Unrolls

STALE = Sign(
    "clipped_rho",
    "data too old",
    "{value:.0%} of the importance weights are cut off, because the data is too old",
    "Lower store.capacity.",
    above=0.3,
)


class VTrace:
    """Policy gradient with V-trace targets, a value loss and an entropy bonus. Owned by the learner thread."""

    overlap = 1

    def __init__(self, config: AlgorithmConfig, actions: Actions, model: nn.Module) -> None:
        self._config = config
        self._actions = actions
        self._popart = popart_of(model)
        self._bound = RewardBound(config.discount, model)
        self._minibatches = Minibatches(config.passes, config.minibatches)
        self.signs = actor_critic_signs(config, actions, model, STALE)

    def valid(self, batch: Unrolls) -> Tensor:
        return valid_transitions(batch, self._config)

    def batches(self, unrolls: Unrolls) -> Iterator[Unrolls]:
        """Yield minibatches of whole unrolls. Later passes use them again, and V-trace corrects for their age."""
        return self._minibatches.of(unrolls)

    def loss(self, batch: Unrolls, forward: Forward, fraction: float) -> Loss:
        output, _ = forward(batch.inputs, batch.core_state)
        centre, unit = (self._popart.moments.mean, self._popart.unit) if self._popart else (0.0, 1.0)
        entropy_cost = entropy_cost_at(self._config, fraction)
        return vtrace_loss(batch, output, self._actions, self._config, entropy_cost, self._bound, unit, centre)

    def stepped(self, loss: Loss) -> None:
        if self._popart:
            self._popart.rescale(loss.report["target_mean"], loss.report["target_square"])

    def tensors(self) -> dict[str, Tensor]:
        return self._minibatches.tensors()

    def load(self, tensors: dict[str, Tensor]) -> None:
        self._minibatches.load(tensors)


def vtrace_loss(
    unrolls: Unrolls,
    output: ModelOutput,
    actions: Actions,
    config: AlgorithmConfig,
    entropy_cost: float,
    bound: RewardBound,
    unit: Tensor | float = 1.0,
    centre: Tensor | float = 0.0,
) -> Loss:
    """Return the loss of section 4.2.

    `bound` is what the sizes of targets are compared with, `unit` what advantages and errors of values are measured in,
    `centre` what the square of targets is about.
    """
    step = transitions(unrolls, config)
    weight = step.weight_t
    log_prob_t = actions.log_prob(output.logits[:-1], step.action_t)
    log_rho_t = log_prob_t.detach() - actions.log_prob(unrolls.behavior_logits[:-1], step.action_t)

    targets = vtrace(
        log_rho_t=log_rho_t,
        reward_tp1=step.reward_tp1,
        discount_tp1=step.discount_tp1,
        value=output.value.detach(),
        valid_t=step.valid_t,
        rho_bar=config.vtrace.rho_bar,
        c_bar=config.vtrace.c_bar,
        pg_rho_bar=config.vtrace.pg_rho_bar,
        trace_lambda=config.trace_lambda,
    )

    advantage = targets.pg_advantage / unit
    if config.normalize_advantage:
        advantage = normalized(advantage, weight)
    if config.passes > 1 and config.vtrace.clip:
        advantage = within_reach(advantage, log_rho_t, config.vtrace.clip)
    policy = -(weight * advantage * log_prob_t).sum()
    value = 0.5 * (weight * ((targets.vs - output.value[:-1]) / unit).square()).sum()
    entropy = (weight * actions.entropy(output.logits[:-1])).sum()
    with torch.no_grad():
        about = {
            "kl": divergence(log_rho_t, weight),  # behavior ‖ target
            "clipped_rho": clipped_share(log_rho_t, config.vtrace.rho_bar, weight),
            "value_share": bound.share(step.reward_tp1, targets.vs, weight),
            "explained_variance": explained_variance(output.value[:-1], targets.vs, weight),
            **target_moments(targets.vs, weight, centre),
        }
    return actor_critic_loss(policy, value, entropy, config.value_cost, entropy_cost, about)


def within_reach(advantage: Tensor, log_ratio: Tensor, clip: float) -> Tensor:
    """Return advantages, and 0 for actions that are 1 + clip times as likely, or as unlikely, as they were.

    In several passes the same advantages would move the policy again and again. Their gradient is that of the clipped
    surrogate of PPO, which ends there as well.
    """
    return advantage.masked_fill(log_ratio * advantage.sign() > math.log1p(clip), 0.0)


class Targets(NamedTuple):
    vs: Tensor  # [T, B]  value targets
    pg_advantage: Tensor  # [T, B]  what to weigh the policy gradient with


@torch.no_grad()
def vtrace(
    *,
    log_rho_t: Tensor,  # [T, B]  log of target over behavior probability of a_t
    reward_tp1: Tensor,  # [T, B]  for the transition t → t+1
    discount_tp1: Tensor,  # [T, B]  0 where x_{t+1} is terminal
    value: Tensor,  # [T+1, B]  V(x_0) … V(x_T)
    valid_t: Tensor,  # [T, B]  false where t → t+1 is no transition of the environment
    rho_bar: float,
    c_bar: float,
    pg_rho_bar: float,
    trace_lambda: float,
) -> Targets:
    """Equation 1 in its recursive form (remark 1), and the advantage of section 4.2.

        vs_t - V_t = delta_t + gamma_{t+1} c_t (vs_{t+1} - V_{t+1})
        delta_t = rho_t (r_{t+1} + gamma_{t+1} V_{t+1} - V_t)

    A row that is not valid contributes nothing: its target is its own value, so a transition that leads to it
    bootstraps from exactly that value, and no trace crosses it.
    """
    valid = valid_t.to(value.dtype)
    rho = log_rho_t.exp()
    clipped_rho = rho.clamp(max=rho_bar) * valid
    c = trace_lambda * rho.clamp(max=c_bar) * valid
    delta = clipped_rho * (reward_tp1 + discount_tp1 * value[1:] - value[:-1])

    vs = value + decayed_sums(delta, discount_tp1 * c)  # vs_T = V_T, from which the unroll bootstraps

    pg_rho = rho.clamp(max=pg_rho_bar) * valid
    pg_advantage = pg_rho * (reward_tp1 + discount_tp1 * vs[1:] - value[:-1])
    return Targets(vs[:-1], pg_advantage)
