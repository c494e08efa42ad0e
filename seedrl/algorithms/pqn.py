"""Q(lambda) without replay or a target network: PQN (Gallici et al. 2024, arXiv:2407.04811).

The `logits` of the model are action values Q(x, a), so that the most likely action is the best one and `exploration.*`
makes actors epsilon-greedy. Layer normalisation (`model.layer_norm`) is what keeps this stable. Targets are computed
once per train batch, with the weights from before its gradient steps; actors need not wait for updates, for the targets
ask which action is best and not how likely the recorded one was.

Knows nothing of optimisers or threads.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from seedrl.actions import FORBIDDEN_BELOW, Actions
from seedrl.algorithms.actor_critic import RewardBound, explained_variance, value_signs
from seedrl.algorithms.base import Forward, Loss
from seedrl.algorithms.minibatches import Minibatches, Rows
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.algorithms.signs import Signs
from seedrl.algorithms.transitions import transitions
from seedrl.errors import ConfigError
from seedrl.types import Unrolls


class PQN:
    """Squared error of the values of actions taken, in several passes. Owned by the learner thread."""

    overlap = 1

    def __init__(self, config: AlgorithmConfig, actions: Actions, model: nn.Module) -> None:
        if actions.shape:
            raise ConfigError(
                "algorithm.name=pqn needs actions that are a single discrete choice, for it learns the value of each; "
                "set algorithm=ppo for all others"
            )
        self._config = config
        self._model = model
        self._bound = RewardBound(config.discount, model)
        self._value_share = torch.zeros(())  # of this train batch, for reports
        self._minibatches = Minibatches(config.passes, config.minibatches)
        self.signs = _signs(config, model)

    def valid(self, batch: Rows) -> Tensor:
        return batch.given["valid"]

    def batches(self, unrolls: Unrolls) -> Iterator[Rows]:
        return self._minibatches.of(Rows.of(unrolls, self._given(unrolls)))

    @torch.no_grad()
    def _given(self, unrolls: Unrolls) -> dict[str, Tensor]:
        """Return what stays the same in all passes, [T, B] each."""
        step = transitions(unrolls, self._config)
        output, _ = self._model(unrolls.inputs, unrolls.core_state)
        target = q_lambda(
            reward_tp1=step.reward_tp1,
            discount_tp1=step.discount_tp1,
            best_tp1=best_value(output.logits)[1:],
            valid_t=step.valid_t,
            trace_lambda=self._config.trace_lambda,
        )
        self._value_share = self._bound.share(step.reward_tp1, target, step.weight_t)
        return {
            "action": step.action_t,
            "valid": step.valid_t,
            "weight": step.valid_t * unrolls.weight,
            "target": target,
            "q": value_of(output.logits[:-1], step.action_t),
        }

    def loss(self, batch: Rows, forward: Forward, fraction: float) -> Loss:
        given = batch.given
        output, _ = forward(batch.inputs, batch.core_state)
        weight = given["weight"] / given["valid"].sum().clamp(min=1)
        q = value_of(output.logits, given["action"])
        q_loss = 0.5 * (weight * (given["target"] - q).square()).sum()
        with torch.no_grad():
            report = {
                "q_loss": q_loss,
                "mean_q": (weight * q).sum(),
                "max_target": given["target"].masked_fill(~given["valid"], -torch.inf).amax().nan_to_num(neginf=0.0),
                "value_share": self._value_share,
                "explained_variance": explained_variance(given["q"], given["target"], weight),
            }
        total = q_loss + 0.0 * output.value.sum()  # nothing learns from this head, but ranks wait for its gradient
        return Loss(total, {name: value.detach() for name, value in report.items()})

    def stepped(self, loss: Loss) -> None:
        pass

    def tensors(self) -> dict[str, Tensor]:
        return self._minibatches.tensors()

    def load(self, tensors: dict[str, Tensor]) -> None:
        self._minibatches.load(tensors)


def value_of(logits: Tensor, action: Tensor) -> Tensor:
    """Return Q(x, a) [T, B] of the actions taken."""
    return logits.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def best_value(logits: Tensor) -> Tensor:
    """Return max Q(x, a) over what is allowed; 0 where a mask allows nothing, as some do at the end of an episode."""
    best = logits.amax(dim=-1)
    return best.masked_fill(best < FORBIDDEN_BELOW, 0.0)


@torch.no_grad()
def q_lambda(
    *,
    reward_tp1: Tensor,  # [T, B]  for the transition t → t+1
    discount_tp1: Tensor,  # [T, B]  0 where x_{t+1} is terminal
    best_tp1: Tensor,  # [T, B]  max Q(x_{t+1}, a)
    valid_t: Tensor,  # [T, B]  false where t → t+1 is no transition of the environment
    trace_lambda: float,
) -> Tensor:
    """Return the targets [T, B] of Peng's Q(lambda), section 4 of the paper.

        G_t = r_{t+1} + gamma_{t+1} ((1 - lambda) max Q(x_{t+1}) + lambda G_{t+1})

    G_{t+1} is max Q(x_{t+1}) where nothing follows: at the end of the unroll, and where row t+1 is not valid, which is
    the last one of an episode. So a truncated episode bootstraps from its true final observation, and no trace crosses
    an end. The target of a row that is not valid means nothing.
    """
    target = torch.empty_like(reward_tp1)
    following = best_tp1[-1]
    for t in reversed(range(len(reward_tp1))):
        best = best_tp1[t]
        target[t] = reward_tp1[t] + discount_tp1[t] * ((1 - trace_lambda) * best + trace_lambda * following)
        following = torch.where(valid_t[t], target[t], best_tp1[t - 1])  # at t = 0 nothing uses it
    return target


def _signs(config: AlgorithmConfig, model: nn.Module) -> Signs:
    """Return the signs of exploding and of useless values; both call for layer normalisation, where there is none."""
    is_normalized = any(isinstance(module, nn.LayerNorm) for module in model.modules())
    calmer = f"Lower algorithm.learning_rate (now {config.learning_rate:g})."
    exploding, useless = value_signs(config, calmer if is_normalized else "Set model.layer_norm=true.")
    useless = replace(useless, change=exploding.change)
    return Signs((exploding, useless), if_flat="Raise exploration.epsilon, or exploration.epsilon_end if that is set.")
