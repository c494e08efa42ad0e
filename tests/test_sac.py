"""Soft actor-critic: its density, its targets and its gradients against independent computations, and a task."""

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from seedrl.actions import Actions
from seedrl.algorithms.sac import SAC
from seedrl.algorithms.settings import AlgorithmConfig, SACConfig
from seedrl.algorithms.transitions import transitions
from seedrl.config import Activation, ModelConfig
from seedrl.errors import ConfigError
from seedrl.models.build import build_model
from seedrl.specs import ArraySpec, CategoricalSpec, ContinuousSpec, EnvSpec
from seedrl.types import ModelInput, ModelOutput, Unrolls
from tests.builders import learner_parts, one_step, weights
from tests.fakes import TinyModel
from tests.oracles import (
    DISCOUNT,
    END,
    MISTAKES,
    UNTRAINED,
    Mistake,
    assert_continues_exactly,
    assert_values,
    chain_rows,
    learn,
    random_unrolls,
    slow_returns,
    to_unrolls,
)

torch.set_num_threads(1)  # for tensors this small a second thread only waits

BOX = ContinuousSpec((-2.0, -1.0), (2.0, 3.0), (2,))
MODEL = ModelConfig(
    layers=[16, 16],
    activation=Activation.relu,
    popart=False,
    normalize=False,
    squash=True,
    state_std=True,
    separate=False,
)


def box_spec(action: Any = BOX, size: int = 3) -> EnvSpec:
    return EnvSpec(ArraySpec((size,), "float32"), action)


def settings(**own: Any) -> AlgorithmConfig:
    return one_step(name="sac", discount=DISCOUNT, sac=SACConfig(**own))


def make_sac(model: nn.Module, spec: EnvSpec, **own: Any) -> SAC:
    return SAC(settings(**own), Actions(spec, squash=True), model)


# The density of squashed actions.


def test_squashed_log_prob_equals_that_of_a_transformed_distribution() -> None:
    generator = torch.Generator().manual_seed(1)
    parameters = 0.5 * torch.randn(200, 4, generator=generator, dtype=torch.float64)
    action = 2 * torch.randn(200, 2, generator=generator, dtype=torch.float64)
    mean, log_std = parameters.chunk(2, dim=-1)
    expected = TransformedDistribution(Normal(mean, log_std.exp()), [TanhTransform()]).log_prob(action.tanh()).sum(-1)
    found = Actions(box_spec(), squash=True).squashed_log_prob(parameters, action)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_squashed_density_integrates_to_one() -> None:
    actions = Actions(box_spec(ContinuousSpec((-1.0,), (1.0,), (1,))), squash=True)
    squashed = torch.linspace(-1, 1, 200_002, dtype=torch.float64)[1:-1].unsqueeze(-1)
    for mean, log_std in ((0.0, 0.0), (0.7, -1.0), (-0.5, -0.3)):
        parameters = torch.tensor([mean, log_std], dtype=torch.float64).expand(len(squashed), 2)
        density = actions.squashed_log_prob(parameters, squashed.atanh()).exp()
        assert torch.trapezoid(density, squashed[:, 0]).item() == pytest.approx(1.0, abs=1e-3)


def test_squashed_log_prob_is_finite_where_tanh_is_one() -> None:
    """In float32 tanh(10) is 1, so that log(1 - tanh²) would be infinite."""
    action = torch.tensor([[10.0, -40.0]], requires_grad=True)
    found = Actions(box_spec(), squash=True).squashed_log_prob(torch.tensor([[9.0, -39.0, 0.0, 0.0]]), action)
    found.sum().backward()
    slope = 2 * (2 * math.log(2) - 10 - 40)  # log(1 - tanh(u)²) ≈ 2 log 2 - 2|u|
    assert found.item() == pytest.approx(-1.0 - math.log(2 * math.pi) - slope, rel=1e-6)
    assert action.grad is not None
    assert action.grad.isfinite().all()


# Targets, in plain loops.


class Fixed(nn.Module):
    """A policy and critics that output what they are given, whatever the observation is."""

    core_size = 0

    def __init__(self, rows: int, batch: int, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.logits = nn.Parameter(0.5 * torch.randn(rows, batch, 4, dtype=torch.float64, generator=generator))
        self.seeds = iter((1, 2))

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        return ModelOutput(self.logits, self.logits[..., 0]), core_state

    def action_critic(self) -> nn.Module:
        return FixedCritic(*self.logits.shape[:2], seed=next(self.seeds))


class FixedCritic(nn.Module):
    """Q = table[t, b] + sum of the action's entries times weights."""

    def __init__(self, rows: int, batch: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(rows, batch, dtype=torch.float64, generator=generator))
        self.slope = nn.Parameter(torch.randn(2, dtype=torch.float64, generator=generator))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.table[: len(action)] + action @ self.slope


def box_unrolls(seed: int) -> Unrolls:
    """Random unrolls with ends, and continuous actions of two dimensions."""
    unrolls = random_unrolls(seed=seed)
    action = torch.randn(*unrolls.action.shape, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return unrolls._replace(action=action, weight=torch.tensor([1.0, 0.5, 2.0, 0.1], dtype=torch.float64))


@pytest.mark.parametrize("steps", [1, 3])
def test_loss_and_gradients_equal_a_transcription(steps: int) -> None:
    """Each part has gradients for its own weights alone: the critics', the policy's and the temperature's."""
    unrolls, model, temperature = box_unrolls(3), Fixed(6, 4), 0.3
    algorithm = make_sac(model, box_spec(size=1), n_steps=steps, temperature=temperature)
    list(algorithm.batches(unrolls))
    targets = [
        (critic.table.detach().numpy().copy(), critic.slope.detach().numpy().copy()) for critic in critics(algorithm)
    ]
    with torch.no_grad():
        for critic in critics(algorithm):
            critic.table.add_(0.5)  # the target critics stay
    drawn = drawn_with(algorithm, model.logits)
    loss = algorithm.loss(unrolls, model, 0.0)
    loss.total.backward()

    log_prob = log_density(model.logits, drawn)
    squashed = np.tanh(drawn.detach().numpy())
    step = transitions(unrolls, settings())
    value = np.minimum(*(table + squashed @ slope for table, slope in targets))
    gamma = step.discount_tp1.double().numpy()
    case = {
        "reward": step.reward_tp1.numpy() - gamma * temperature * log_prob.detach().numpy()[1:],
        "gamma": gamma,
        "value": value,
        "valid": step.valid_t.numpy(),
    }
    target = torch.from_numpy(slow_returns(case, steps))
    weight = step.valid_t * unrolls.weight / step.valid_t.sum()

    for critic in critics(algorithm):
        twin = copy.deepcopy(critic)
        error = twin(None, unrolls.action[:-1].tanh()) - target
        (0.5 * (weight * error.square()).sum()).backward()
        for own, expected in zip(critic.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(own.grad, expected.grad, rtol=1e-6, atol=1e-9)

    best = torch.minimum(*(critic(None, drawn[:-1].tanh()) for critic in critics(algorithm)))
    policy = (weight * (temperature * log_prob[:-1] - best)).sum()
    (expected,) = torch.autograd.grad(policy, model.logits)
    torch.testing.assert_close(model.logits.grad, expected, rtol=1e-5, atol=1e-7)

    entropy = -(weight * log_prob.detach()[:-1]).sum()
    assert algorithm.networks.log_temperature.grad is not None
    torch.testing.assert_close(
        algorithm.networks.log_temperature.grad.double(), entropy + 2.0 * weight.sum(), rtol=1e-5, atol=1e-7
    )
    assert loss.report["temperature"].item() == pytest.approx(temperature)
    assert loss.report["entropy"].item() == pytest.approx(entropy.item(), rel=1e-5)


def critics(algorithm: SAC) -> list[Any]:
    return list(algorithm.networks.critics)


def drawn_with(algorithm: SAC, logits: Tensor) -> Tensor:
    """The actions that the loss will draw, by the formula: mean + deviation × noise."""
    generator = torch.Generator()
    generator.set_state(algorithm.tensors()["generator"])
    noise = torch.empty(logits.shape[0] * logits.shape[1], 2).normal_(generator=generator).view(*logits.shape[:2], 2)
    mean, log_std = logits.chunk(2, dim=-1)
    return mean + log_std.exp() * noise


def log_density(logits: Tensor, drawn: Tensor) -> Tensor:
    mean, log_std = logits.chunk(2, dim=-1)
    return (
        TransformedDistribution(Normal(mean, log_std.exp()), [TanhTransform(cache_size=1)])
        .log_prob(drawn.tanh())
        .sum(-1)
    )


# Episode ends, on a chain whose values are known.


class Still(nn.Module):
    """A policy that always draws the mean, and critics that know positions alone."""

    core_size = 0

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        rows = self.unused.expand(*inputs.reward.shape)
        return ModelOutput(rows.unsqueeze(-1).expand(*rows.shape, 4), rows), core_state

    def action_critic(self) -> nn.Module:
        return PositionCritic()


class PositionCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.full((END + 1,), UNTRAINED))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return observation @ self.values


TEMPERATURE = 0.5
BONUS = TEMPERATURE * math.log(2 * math.pi)  # minus the log density of two Gaussians at their mean, where tanh' is 1


def soft_values() -> Tensor:
    """Q(x) = 1, and after all but the last step discount × (bonus + Q(x + 1))."""
    values = [1.0]
    for _ in range(END - 1):
        values.insert(0, 1.0 + DISCOUNT * (BONUS + values[0]))
    return torch.tensor(values)


def learned_values(unrolls: Unrolls, monkeypatch: pytest.MonkeyPatch, steps: int = 1) -> Tensor:
    model = Still()
    algorithm = make_sac(model, box_spec(size=END + 1), n_steps=steps, temperature=TEMPERATURE, target_rate=0.5)
    monkeypatch.setattr(algorithm, "_drawn", lambda parameters: parameters.chunk(2, dim=-1)[0])
    unrolls = unrolls._replace(action=torch.zeros(*unrolls.action.shape, 2))
    learn(algorithm, model, unrolls, steps=150, trained=algorithm.networks.critics)
    first, second = (critic.values.detach() for critic in critics(algorithm))
    torch.testing.assert_close(first, second)
    return first


@pytest.mark.parametrize("steps", [1, 3])
def test_loss_chain_with_time_limit_learns_the_soft_values_without_it(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_values(learned_values(to_unrolls(chain_rows(300)), monkeypatch, steps), soft_values())


@pytest.mark.parametrize("mistake", MISTAKES)
def test_loss_mistaken_episode_ends_learn_other_values(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    learned = learned_values(to_unrolls(mistake(chain_rows(300))), monkeypatch)
    assert (learned[:END] - soft_values()).abs().max() > 0.3


# With a learner.


def test_train_changes_all_weights_but_those_of_the_value_head() -> None:
    spec = box_spec()
    parts = learner_parts(settings(), build_model(MODEL, spec, seed=1), spec)
    parts.record()
    before = weights(parts.learner._trained)
    assert parts.update()
    after = weights(parts.learner._trained)
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged == {"0.value_head.weight", "0.value_head.bias"}
    assert set(parts.metrics.algorithm) == {
        *("loss", "critic_loss", "policy_loss", "entropy", "temperature", "mean_q", "value_share"),
        "explained_variance",
    }


def test_learner_continues_exactly_from_its_tensors() -> None:
    spec = box_spec()
    first, second = (learner_parts(settings(), build_model(MODEL, spec, seed), spec) for seed in (1, 2))
    assert_continues_exactly(first, second)


def test_training_approaches_the_best_action_and_the_wanted_entropy() -> None:
    """One step of reward -4 (a - 0.5)²: a part of the loss with a wrong sign would lead elsewhere."""
    spec, wanted = box_spec(ContinuousSpec((-1.0,), (1.0,), (1,)), size=1), -0.5
    model = build_model(replace(MODEL, layers=[32, 32]), spec, seed=1)
    algorithm = SAC(settings(target_entropy=wanted, temperature=0.1), Actions(spec, squash=True), model)
    optimizer = torch.optim.Adam([*model.parameters(), *algorithm.networks.parameters()], lr=1e-2)
    for number in range(250):
        unrolls = bandit(number)
        for batch in algorithm.batches(unrolls):
            optimizer.zero_grad()
            loss = algorithm.loss(batch, model, 0.0)
            loss.total.backward()
            optimizer.step()
            algorithm.stepped(loss)
    output, _ = model(unrolls.inputs, unrolls.core_state)
    assert output.logits[0, 0, 0].tanh().item() == pytest.approx(0.5, abs=0.2)
    assert loss.report["entropy"].item() == pytest.approx(wanted, abs=0.4)


def bandit(seed: int, batch: int = 64) -> Unrolls:
    """Episodes of one step with random actions."""
    action = torch.randn(2, batch, 1, generator=torch.Generator().manual_seed(seed))
    reward = torch.stack([torch.zeros(batch), -4 * (action[0, :, 0].tanh() - 0.5).square()])
    unrolls = random_unrolls(length=1, batch=batch, seed=seed, ends=0.0)
    return unrolls._replace(
        inputs=unrolls.inputs._replace(reward=reward),
        terminated=torch.tensor([[False], [True]]).expand(2, batch),
        action=action,
    )


# What is refused.


@pytest.mark.parametrize(
    "action",
    [
        CategoricalSpec((3,), ()),
        CategoricalSpec((3, 3), (2,)),
        ContinuousSpec((-1.0, -math.inf), (1.0, math.inf), (2,)),
    ],
)
def test_build_actions_other_than_bounded_continuous_ones_are_refused(action: Any) -> None:
    spec = box_spec(action)
    with pytest.raises(ConfigError, match="all continuous and bounded"):
        make_sac(build_model(MODEL, spec, seed=1), spec)


def test_build_without_squashing_memory_or_critics_is_refused() -> None:
    spec = box_spec()
    with pytest.raises(ConfigError, match=r"model\.squash=true"):
        SAC(settings(), Actions(spec), build_model(MODEL, spec, seed=1))
    with pytest.raises(ConfigError, match="without a memory"):
        make_sac(TinyModel(spec, core_size=2), spec)
    with pytest.raises(ConfigError, match=r"a model with a method action_critic\(\)"):
        make_sac(TinyModel(spec), spec)
