"""Behaviour cloning: the policy learns to take the recorded actions, and the value what they are worth.

It needs recorded unrolls and no actors (`source=DIR`). The value is not needed to imitate; it is learned from the
recorded rewards so that a run that continues from the result (`init_from=`) has one to begin with.

Knows nothing of optimisers, threads, or where unrolls come from.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms.actor_critic import ValueTargets, value_signs
from seedrl.algorithms.base import Forward, Loss
from seedrl.algorithms.minibatches import Minibatches, Rows
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.algorithms.signs import Signs
from seedrl.algorithms.transitions import transitions
from seedrl.algorithms.vtrace import vtrace
from seedrl.types import Unrolls


class BC:
    """Minus the log probability of the recorded actions, and a value loss. Owned by the learner thread."""

    overlap = 1

    def __init__(self, config: AlgorithmConfig, actions: Actions, model: nn.Module) -> None:
        self._config = config
        self._actions = actions
        self._model = model
        self._targets = ValueTargets(config.discount, model)
        self._minibatches = Minibatches(config.passes, config.minibatches)
        calmer = f"Lower algorithm.learning_rate (now {config.learning_rate:g})."
        self.signs = Signs(value_signs(config, calmer))

    def valid(self, batch: Rows) -> Tensor:
        return batch.given["valid"]

    def batches(self, unrolls: Unrolls) -> Iterator[Rows]:
        return self._minibatches.of(Rows.of(unrolls, self._given(unrolls)))

    @torch.no_grad()
    def _given(self, unrolls: Unrolls) -> dict[str, Tensor]:
        """Return what stays the same in all passes, [T, B] each.

        The value targets are the lambda-returns of what was recorded, that is V-trace with all ratios 1.
        """
        step = transitions(unrolls, self._config)
        output, _ = self._model(unrolls.inputs, unrolls.core_state)
        target, _ = vtrace(
            log_rho_t=torch.zeros_like(step.reward_tp1),
            reward_tp1=step.reward_tp1,
            discount_tp1=step.discount_tp1,
            value=output.value,
            valid_t=step.valid_t,
            rho_bar=1.0,
            c_bar=1.0,
            pg_rho_bar=1.0,
            trace_lambda=self._config.trace_lambda,
        )
        self._targets.note(reward=step.reward_tp1, value=output.value[:-1], target=target, weight=step.weight_t)
        weight = step.valid_t * unrolls.weight
        return {"action": step.action_t, "valid": step.valid_t, "weight": weight, "target": target}

    def loss(self, batch: Rows, forward: Forward, fraction: float) -> Loss:
        given, actions = batch.given, self._actions
        output, _ = forward(batch.inputs, batch.core_state)
        weight = given["weight"] / given["valid"].sum().clamp(min=1)
        imitation = -(weight * actions.log_prob(output.logits, given["action"])).sum()
        value = 0.5 * (weight * ((given["target"] - output.value) / self._targets.unit).square()).sum()
        with torch.no_grad():
            report = {
                "imitation_loss": imitation,
                "value_loss": value,
                "entropy": (weight * actions.entropy(output.logits)).sum(),
                "distance": (weight * distance(actions, output.logits, given["action"])).sum(),
                **self._targets.report(),
            }
        total = imitation + self._config.value_cost * value
        return Loss(total, {name: number.detach() for name, number in report.items()})

    def stepped(self, loss: Loss) -> None:
        self._targets.follow(loss.report)

    def tensors(self) -> dict[str, Tensor]:
        return self._minibatches.tensors()

    def load(self, tensors: dict[str, Tensor]) -> None:
        self._minibatches.load(tensors)


def distance(actions: Actions, parameters: Tensor, action: Tensor) -> Tensor:
    """Return how far the most likely actions [T, B] are from others: 0 if they are the same, at most 1.

    It is the share of choices that differ, and of the range of continuous actions that lies between the two.
    """
    best = actions.choose(parameters, parameters.new_zeros(*parameters.shape[:-1], actions.noise_size))
    apart = (actions.features(best) - actions.features(action)).abs().sum(dim=-1)
    return apart / (2 * max(1, sum(actions.shape)))
