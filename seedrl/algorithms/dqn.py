"""Q-learning from replayed unrolls: DQN, and R2D2 (Kapturowski et al. 2019) if the model has a memory.

The model's two heads are those of a dueling network (Wang et al. 2016, arXiv:1511.06581):

    Q(x, a) = value(x) + logits(x, a) - mean of the logits over what is allowed

The best action is therefore the most likely one: serving, evaluation and export take it without knowing of any of this,
and `exploration.*` makes actors epsilon-greedy. Targets are n-step returns that bootstrap from a target network, for
the action that the trained network prefers (double Q-learning, van Hasselt et al. 2015, arXiv:1509.06461).

With a recurrent model the first `dqn.burn_in` rows of an unroll only bring the core_state of both networks up to date.
They are also the last rows of the unroll before, so that every transition is trained on in one unroll. The core_state
that the store keeps is the one before the first of them.

Knows nothing of optimisers, threads, or how unrolls are selected.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from seedrl.actions import FORBIDDEN_BELOW, Actions
from seedrl.algorithms.actor_critic import RewardBound, explained_variance, value_signs
from seedrl.algorithms.base import Forward, Loss
from seedrl.algorithms.bootstrap import TargetNetwork, n_step, priority_of
from seedrl.algorithms.minibatches import Minibatches
from seedrl.algorithms.pqn import value_of
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.algorithms.signs import Signs
from seedrl.algorithms.transitions import Transitions, shaped_reward, transitions, valid_transitions
from seedrl.errors import ConfigError
from seedrl.models.base import core_size_of
from seedrl.types import ModelOutput, Recorded, Unrolls

Scale = Callable[[Tensor], Tensor]
SLOPE = 1e-3  # of the rescaled values far from 0, so that the scale can be inverted


class DQN:
    """Squared errors of the values of actions taken, which are also the priorities. Owned by the learner thread."""

    def __init__(self, config: AlgorithmConfig, actions: Actions, model: nn.Module) -> None:
        if actions.shape:
            raise ConfigError(
                "algorithm.name=dqn needs actions that are a single discrete choice, for it learns the value of each; "
                "set algorithm=sac for continuous actions and algorithm=ppo for all others"
            )
        self._config = config
        self._model = model
        self._target = TargetNetwork(model)
        self._rescaled: Scale = rescaled if config.dqn.rescale else _unchanged
        self._unscaled: Scale = unscaled if config.dqn.rescale else _unchanged
        self._burn_in = config.dqn.burn_in if core_size_of(model) else 0
        self._bound = RewardBound(config.discount, model)
        self._minibatches = Minibatches(config.passes, config.minibatches)
        self._steps = 0  # gradient steps so far
        self.overlap = self._burn_in + 1
        self.signs = _signs(config)

    def valid(self, batch: Unrolls) -> Tensor:
        return valid_transitions(batch, self._config)[self._burn_in :]

    def batches(self, unrolls: Unrolls) -> Iterator[Unrolls]:
        """Yield minibatches of whole unrolls. The target network begins with the weights that the run begins with."""
        if not self._steps:
            self._target.follow()
        return self._minibatches.of(unrolls)

    def loss(self, batch: Unrolls, forward: Forward, fraction: float) -> Loss:
        trained = self._after_burn_in(batch)
        step = transitions(trained, self._config)
        output, _ = forward(trained.inputs, trained.core_state)
        q = action_values(output)
        returns, target = self._targets(batch, step, q.detach())
        q_taken = value_of(q[:-1], step.action_t)
        q_loss = 0.5 * (step.weight_t * (target - q_taken).square()).sum()
        with torch.no_grad():
            error, weight = (target - q_taken).abs() * step.valid_t, step.weight_t
            report = {
                "q_loss": q_loss.detach(),
                "mean_q": (weight * q_taken).sum(),
                "mean_error": (weight * error).sum(),
                "max_target": target.masked_fill(~step.valid_t, -torch.inf).amax().nan_to_num(neginf=0.0),
                "value_share": self._bound.share(step.reward_tp1, returns, weight),
                "explained_variance": explained_variance(q_taken, target, weight),
            }
            return Loss(q_loss, report, priority=priority_of(error, step.valid_t, self._config.dqn.eta))

    @torch.no_grad()
    def _after_burn_in(self, batch: Unrolls) -> Unrolls:
        """Return the rows that are trained on, with the core_state that the newest weights have before them."""
        if not self._burn_in:
            return batch
        _, core_state = self._model(batch.inputs.tree_map(lambda rows: rows[: self._burn_in]), batch.core_state)
        return batch.rows_from(self._burn_in, core_state)

    @torch.no_grad()
    def _targets(self, batch: Unrolls, step: Transitions, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the n-step returns [T, B], and the same on the scale that values are learned on."""
        output, _ = self._target.network(batch.inputs, batch.core_state)
        preferred = value_of(action_values(output)[self._burn_in :], q.argmax(dim=-1))
        value = preferred.masked_fill(preferred < FORBIDDEN_BELOW, 0.0)  # a mask may allow nothing at an end
        returns = n_step(
            reward_tp1=step.reward_tp1,
            discount_tp1=step.discount_tp1,
            value=self._unscaled(value),
            valid_t=step.valid_t,
            steps=self._config.dqn.n_steps,
        )
        return returns, self._rescaled(returns)

    @torch.no_grad()
    def initial_priority(self, recorded: Recorded) -> Tensor:
        """Return the priorities [B] of new unrolls by the values that inference computed. Thread-safe.

        The value of an observation stands in for that of the action: the recorded logits are those that exploration
        drew from, and at temperature 0 they tell nothing but which action was best.
        """
        config, value = self._config, recorded.behavior_value
        valid_t = ~(recorded.terminated | recorded.truncated)[:-1]
        returns = n_step(
            reward_tp1=shaped_reward(recorded.reward[1:], config),
            discount_tp1=config.discount * (~recorded.terminated[1:]).float(),
            value=self._unscaled(value),
            valid_t=valid_t,
            steps=config.dqn.n_steps,
        )
        error = (self._rescaled(returns) - value[:-1]).abs() * valid_t
        return priority_of(error[self._burn_in :], valid_t[self._burn_in :], config.dqn.eta)

    def stepped(self, loss: Loss) -> None:
        self._steps += 1
        if self._steps % self._config.dqn.target_period == 0:
            self._target.follow()

    def tensors(self) -> dict[str, Tensor]:
        return {**self._minibatches.tensors(), **self._target.tensors(), "steps": torch.tensor(self._steps)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        self._minibatches.load(tensors)
        self._target.load(tensors)
        self._steps = int(tensors["steps"])


def action_values(output: ModelOutput) -> Tensor:
    """Return Q(x, a) [T+1, B, A] of a dueling network; forbidden choices keep their logits, which are below all."""
    allowed = output.logits > FORBIDDEN_BELOW
    mean = (output.logits * allowed).sum(dim=-1, keepdim=True) / allowed.sum(dim=-1, keepdim=True).clamp(min=1)
    return torch.where(allowed, output.value.unsqueeze(-1) + output.logits - mean, output.logits)


def rescaled(x: Tensor) -> Tensor:
    """Return h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x, of Pohlen et al. 2018, arXiv:1805.11593.

    The difference is written as a quotient, here and below: it would lose most digits of small numbers.
    """
    return x / ((x.abs() + 1).sqrt() + 1) + SLOPE * x


def unscaled(y: Tensor) -> Tensor:
    """Return the x with h(x) = y, proposition A.2 of the same paper."""
    distance = y.abs() + 1 + SLOPE
    root = 2 * distance / ((1 + 4 * SLOPE * distance).sqrt() + 1)
    return y.sign() * (root.square() - 1)


def _unchanged(x: Tensor) -> Tensor:
    return x


def _signs(config: AlgorithmConfig) -> Signs:
    calmer = f"Lower algorithm.learning_rate (now {config.learning_rate:g})."
    slower = f"Raise algorithm.dqn.target_period (now {config.dqn.target_period})."
    exploding, useless = value_signs(config, slower)
    useless = replace(useless, change=calmer)
    return Signs((exploding, useless), if_flat="Raise exploration.epsilon, or exploration.epsilon_end if that is set.")
