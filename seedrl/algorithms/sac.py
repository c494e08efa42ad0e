"""Soft actor-critic for continuous actions (Haarnoja et al. 2018, arXiv:1812.05905), on replayed unrolls.

The policy is a Gaussian whose draws pass through tanh (`model.squash`); recorded actions are the draws, so that their
density is exact up to the bounds. Two critics Q(x, a) and the temperature, which weighs the entropy, are `networks`:
they are trained and saved with the model and never served.

One gradient step is for all of them: the loss is a sum of three parts, each of which has gradients only for its own
weights, and Adam makes the step of each independent of the scale of the others.

Knows nothing of optimisers, threads, or how unrolls are selected.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms.actor_critic import RewardBound, explained_variance, value_signs
from seedrl.algorithms.base import Forward, Loss
from seedrl.algorithms.bootstrap import TargetNetwork, n_step, priority_of
from seedrl.algorithms.minibatches import Minibatches
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.algorithms.signs import Signs
from seedrl.algorithms.transitions import Transitions, transitions, valid_transitions
from seedrl.errors import ConfigError, require
from seedrl.models.base import core_size_of
from seedrl.specs import tree_map
from seedrl.types import Observation, Unrolls


class SAC:
    """Errors of two critics, a policy that follows the smaller one, and a temperature. Owned by the learner thread."""

    overlap = 1

    def __init__(self, config: AlgorithmConfig, actions: Actions, model: nn.Module) -> None:
        device = next(model.parameters()).device
        self._config = config
        self._actions = actions
        self.networks = _networks(actions, model, config.sac.temperature).to(device)
        self._target = TargetNetwork(self.networks.critics)
        self._target_entropy = target_entropy(config, actions)
        self._generator = torch.Generator(device).manual_seed(0)
        self._bound = RewardBound(config.discount, model)
        self._minibatches = Minibatches(config.passes, config.minibatches)
        self._steps = 0  # gradient steps so far
        self.signs = _signs(config, self._target_entropy)

    def valid(self, batch: Unrolls) -> Tensor:
        return valid_transitions(batch, self._config)

    def batches(self, unrolls: Unrolls) -> Iterator[Unrolls]:
        """Yield minibatches of whole unrolls. The target critics begin with the weights that the critics begin with."""
        if not self._steps:
            self._target.follow()
        return self._minibatches.of(unrolls)

    def loss(self, batch: Unrolls, forward: Forward, fraction: float) -> Loss:
        critics, log_temperature = self.networks.critics, self.networks.log_temperature
        temperature = log_temperature.detach().exp()
        step = transitions(batch, self._config)
        weight, observation_t = step.weight_t, tree_map(lambda rows: rows[:-1], batch.inputs.observation)
        output, _ = forward(batch.inputs, batch.core_state)
        drawn = self._drawn(output.logits)
        log_prob = self._actions.squashed_log_prob(output.logits, drawn)
        entropy = -(weight * log_prob[:-1]).sum()

        reward, target = self._targets(batch, step, drawn.detach(), -temperature * log_prob.detach())
        q = critics(observation_t, self._actions.features(step.action_t))
        critic_loss = 0.5 * (weight * (q - target).square()).sum()
        with _constant(critics):
            q_drawn = critics(observation_t, self._actions.features(drawn[:-1])).amin(dim=0)
        policy_loss = -temperature * entropy - (weight * q_drawn).sum()
        temperature_loss = log_temperature * (entropy.detach() - weight.sum() * self._target_entropy)

        parts = {"critic_loss": critic_loss, "policy_loss": policy_loss, "entropy": entropy, "temperature": temperature}
        report = {name: value.detach() for name, value in parts.items()}
        total = critic_loss + policy_loss + temperature_loss + 0.0 * output.value.sum()  # ranks wait for this head
        mean_q = q.detach().mean(dim=0)
        error = (mean_q - target).abs() * step.valid_t
        return Loss(
            total,
            {**report, **self._about(mean_q, reward, target, weight)},
            priority=priority_of(error, step.valid_t, eta=0.0),
        )

    def _about(self, q: Tensor, reward: Tensor, target: Tensor, weight: Tensor) -> dict[str, Tensor]:
        """Return what else people see of the critics, whose mean is q [T, B]."""
        return {
            "mean_q": (weight * q).sum(),
            "value_share": self._bound.share(reward, target, weight),
            "explained_variance": explained_variance(q, target, weight),
        }

    def _drawn(self, parameters: Tensor) -> Tensor:
        """Draw an action for every row; gradients pass through it to the policy."""
        rows, batch, _ = parameters.shape
        noise = self._actions.noise(rows * batch, self._generator)
        return self._actions.choose(parameters, noise.view(rows, batch, -1))

    @torch.no_grad()
    def _targets(self, batch: Unrolls, step: Transitions, drawn: Tensor, bonus: Tensor) -> tuple[Tensor, Tensor]:
        """Return the soft rewards [T, B] and the n-step returns [T, B] that the critics learn.

        The soft reward of a transition includes the bonus [T+1, B] for the entropy at x_{t+1}, discounted like the
        value there (section 4.1). So returns of any length need nothing but other rewards.
        """
        reward = step.reward_tp1 + step.discount_tp1 * bonus[1:]
        value = self._target.network(batch.inputs.observation, self._actions.features(drawn)).amin(dim=0)
        returns = n_step(
            reward_tp1=reward,
            discount_tp1=step.discount_tp1,
            value=value,
            valid_t=step.valid_t,
            steps=self._config.sac.n_steps,
        )
        return reward, returns

    def stepped(self, loss: Loss) -> None:
        self._steps += 1
        self._target.follow(self._config.sac.target_rate)

    def tensors(self) -> dict[str, Tensor]:
        own = {"steps": torch.tensor(self._steps), "generator": self._generator.get_state()}
        return {**self._minibatches.tensors(), **self._target.tensors(), **own}

    def load(self, tensors: dict[str, Tensor]) -> None:
        self._minibatches.load(tensors)
        self._target.load(tensors)
        self._steps = int(tensors["steps"])
        self._generator.set_state(tensors["generator"].cpu())


class Critics(nn.ModuleList):
    """Several critics of the same kind."""

    def forward(self, observation: Observation, action: Tensor) -> Tensor:
        """Return the values [critics, T, B] of actions [T, B, W]."""
        return torch.stack([critic(observation, action) for critic in self])


class Networks(nn.Module):
    """The networks that are trained besides the policy."""

    def __init__(self, critics: Critics, temperature: float) -> None:
        super().__init__()
        self.critics = critics
        self.log_temperature = nn.Parameter(torch.tensor(temperature).log())


def _networks(actions: Actions, model: nn.Module, temperature: float) -> Networks:
    """Return two critics and a temperature, or raise ConfigError if this model or these actions cannot be trained."""
    require(
        actions.is_squashed,
        "algorithm.name=sac needs actions that are all continuous and bounded, and model.squash=true; "
        "set algorithm=dqn for a single discrete choice and algorithm=ppo for all others",
    )
    require(not core_size_of(model), "algorithm.name=sac has critics without a memory, and the model has one")
    action_critic: Any = getattr(model, "action_critic", None)
    if action_critic is None:
        raise ConfigError(
            "algorithm.name=sac needs a model with a method action_critic(), which returns a new critic Q(x, a); "
            "see ActionCritic in seedrl/models/base.py"
        )
    return Networks(Critics([action_critic(), action_critic()]), temperature)


def target_entropy(config: AlgorithmConfig, actions: Actions) -> float:
    """Return the entropy that the temperature is learned for: unless it is set, minus the dimensions (appendix D)."""
    return -float(actions.noise_size) if config.sac.target_entropy is None else config.sac.target_entropy


@contextmanager
def _constant(module: nn.Module) -> Iterator[None]:
    """Give the weights of a module no gradient from what is computed inside; its inputs have theirs."""
    module.requires_grad_(False)
    try:
        yield
    finally:
        module.requires_grad_(True)


def _signs(config: AlgorithmConfig, entropy: float) -> Signs:
    calmer = f"Lower algorithm.learning_rate (now {config.learning_rate:g})."
    exploding, useless = value_signs(config, calmer)
    bolder = f"Raise algorithm.sac.target_entropy (now {entropy:g})."
    return Signs((exploding, replace(useless, change=calmer)), if_flat=bolder)
