"""Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347) on unrolls that may be a few updates old.

Targets and advantages are computed once per train batch, with the weights from before its gradient steps. The policy of
those weights is the *proximal* one: the ratio that is clipped is that of the new policy to it. The distance between the
proximal policy and the one that acted is corrected by V-trace in the targets, so that actors need not wait for updates.
With `ppo.targets=gae` the recorded values and probabilities are used as they are: this is PPO as published, and right
for `algorithm.on_policy=true`, where both policies are the same.

Knows nothing of optimisers or threads.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms.actor_critic import (
    ValueTargets,
    actor_critic_loss,
    actor_critic_signs,
    clipped_share,
    divergence,
    normalized,
)
from seedrl.algorithms.base import Forward, Loss
from seedrl.algorithms.minibatches import Minibatches, Rows
from seedrl.algorithms.settings import AlgorithmConfig, Targets
from seedrl.algorithms.signs import Sign
from seedrl.algorithms.transitions import Transitions, entropy_cost_at, linear, transitions
from seedrl.algorithms.vtrace import STALE, vtrace
from seedrl.types import Unrolls


class PPO:
    """Clipped policy gradient, value loss and entropy bonus, in several passes. Owned by the learner thread."""

    overlap = 1

    def __init__(self, config: AlgorithmConfig, actions: Actions, model: nn.Module) -> None:
        self._config = config
        self._actions = actions
        self._model = model
        self._targets = ValueTargets(config.discount, model)
        self._minibatches = Minibatches(config.passes, config.minibatches)
        self._clipped_rho = torch.zeros(())  # of this train batch, for reports
        self._has_moved_far = False  # the policy, in this train batch
        self.signs = actor_critic_signs(config, actions, model, *_signs(config))

    def valid(self, batch: Rows) -> Tensor:
        return batch.given["valid"]

    def batches(self, unrolls: Unrolls) -> Iterator[Rows]:
        """Yield minibatches until the policy has moved further than `ppo.max_kl`."""
        self._has_moved_far = False
        for minibatch in self._minibatches.of(Rows.of(unrolls, self._given(unrolls))):
            yield minibatch
            if self._has_moved_far:
                return

    @torch.no_grad()
    def _given(self, unrolls: Unrolls) -> dict[str, Tensor]:
        """Return what stays the same in all passes, [T, B] each."""
        config, step = self._config, transitions(unrolls, self._config)
        value, log_prob, log_rho_t = self._proximal(unrolls, step)
        target, _ = vtrace(
            log_rho_t=log_rho_t,
            reward_tp1=step.reward_tp1,
            discount_tp1=step.discount_tp1,
            value=value,
            valid_t=step.valid_t,
            rho_bar=config.vtrace.rho_bar,
            c_bar=config.vtrace.c_bar,
            pg_rho_bar=config.vtrace.pg_rho_bar,
            trace_lambda=config.trace_lambda,
        )
        self._targets.note(reward=step.reward_tp1, value=value[:-1], target=target, weight=step.weight_t)
        self._clipped_rho = clipped_share(log_rho_t, config.vtrace.rho_bar, step.weight_t)
        advantage = target - value[:-1]
        if config.normalize_advantage:
            advantage = normalized(advantage, step.weight_t)
        return {
            "action": step.action_t,
            "valid": step.valid_t,
            "weight": step.valid_t * unrolls.weight,
            "target": target,
            "advantage": advantage,
            "value": value[:-1],
            "log_prob": log_prob,
        }

    def _proximal(self, unrolls: Unrolls, step: Transitions) -> tuple[Tensor, Tensor, Tensor]:
        """Return values [T+1, B], log probabilities [T, B] of actions, and those minus the recorded ones."""
        recorded = self._actions.log_prob(unrolls.behavior_logits[:-1], step.action_t)
        if self._config.ppo.targets is Targets.gae:
            return unrolls.behavior_value, recorded, torch.zeros_like(recorded)
        output, _ = self._model(unrolls.inputs, unrolls.core_state)
        log_prob = self._actions.log_prob(output.logits[:-1], step.action_t)
        return output.value, log_prob, log_prob - recorded

    def loss(self, batch: Rows, forward: Forward, fraction: float) -> Loss:
        config, given = self._config, batch.given
        output, _ = forward(batch.inputs, batch.core_state)
        weight = given["weight"] / given["valid"].sum().clamp(min=1)
        log_ratio = self._actions.log_prob(output.logits, given["action"]) - given["log_prob"]
        ratio = log_ratio.exp()
        clip = linear(config.ppo.clip, config.ppo.clip_end, fraction)
        entropy_cost = entropy_cost_at(config, fraction)

        policy = -(weight * clipped_surrogate(ratio, given["advantage"], clip)).sum()
        value = 0.5 * (weight * self._squared_error(output.value, given)).sum()
        entropy = (weight * self._actions.entropy(output.logits)).sum()
        with torch.no_grad():
            about = {
                "kl": divergence(log_ratio, weight),  # proximal ‖ new
                "clipped_ratio": (weight * ((ratio - 1).abs() > clip).float()).sum(),
                "clipped_rho": self._clipped_rho,
                **self._targets.report(),
            }
        return actor_critic_loss(policy, value, entropy, config.value_cost, entropy_cost, about)

    def _squared_error(self, value: Tensor, given: dict[str, Tensor]) -> Tensor:
        """Return the squared error of values in units of the targets; with `ppo.value_clip`, the larger of two.

        The second one is that of a value that has moved no further than the clip from where it was.
        """
        unit = self._targets.unit
        error = ((given["target"] - value) / unit).square()
        if not self._config.ppo.value_clip:
            return error
        reach = self._config.ppo.value_clip * unit
        clipped = given["value"] + (value - given["value"]).clamp(-reach, reach)
        return torch.maximum(error, ((given["target"] - clipped) / unit).square())

    def stepped(self, loss: Loss) -> None:
        self._targets.follow(loss.report)
        if self._config.ppo.max_kl:
            self._has_moved_far = bool(loss.report["kl"] > self._config.ppo.max_kl)

    def tensors(self) -> dict[str, Tensor]:
        return self._minibatches.tensors()

    def load(self, tensors: dict[str, Tensor]) -> None:
        self._minibatches.load(tensors)


def clipped_surrogate(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """Equation 7: nothing is gained by a ratio further than `clip` from 1."""
    return torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def _signs(config: AlgorithmConfig) -> tuple[Sign, ...]:
    return (
        Sign(
            "clipped_ratio",
            "ratio clipped",
            "{value:.0%} of the transitions have no gradient, because their ratio is clipped",
            f"Lower algorithm.learning_rate (now {config.learning_rate:g}).",
            above=0.6,
        ),
        STALE,
    )
