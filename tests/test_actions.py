"""Distributions of actions, compared with those of torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Normal

from seedrl.actions import MAX_LOG_STD, MIN_LOG_STD, Actions, bounded_log_std
from seedrl.models.base import FORBIDDEN
from seedrl.specs import ActionSpec, ArraySpec, CategoricalSpec, ContinuousSpec, EnvSpec, discrete, leaves

INFINITY = float("inf")
OBSERVATION = ArraySpec((2,), "float32")
BOX = ContinuousSpec((-2.0, 0.0), (2.0, 10.0), (2,))
TREES: dict[str, Any] = {
    "discrete": discrete(4),
    "multi-discrete": CategoricalSpec((3, 3, 2), (3,)),
    "multi-binary": CategoricalSpec((2,) * 4, (2, 2)),
    "box": BOX,
    "dict": {"jump": discrete(3), "move": BOX, "keys": CategoricalSpec((2, 5), (2,))},
}


def make_actions(tree: Any, squash: bool = False) -> tuple[Actions, EnvSpec]:
    spec = EnvSpec(OBSERVATION, tree)
    return Actions(spec, squash), spec


def parts_of(spec: EnvSpec, parameters: Tensor) -> list[Categorical | Normal]:
    """Return a distribution of torch for each entry of a recorded action."""
    found: list[Categorical | Normal] = []
    at = 0

    def next_parameters(count: int) -> Tensor:
        nonlocal at
        at += count
        return parameters[..., at - count : at]

    def distributions(leaf: ActionSpec) -> list[Categorical | Normal]:
        if isinstance(leaf, CategoricalSpec):
            return [Categorical(logits=next_parameters(size)) for size in leaf.sizes]
        mean, log_std = next_parameters(len(leaf.low)), next_parameters(len(leaf.low)).clamp(MIN_LOG_STD, MAX_LOG_STD)
        return [Normal(mean[..., each], log_std[..., each].exp()) for each in range(len(leaf.low))]

    for leaf in spec.actions:
        found += distributions(leaf)
    assert at == spec.policy_size
    return found


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_log_prob_and_entropy_are_those_of_torch(tree: Any) -> None:
    actions, spec = make_actions(tree)
    generator = torch.Generator().manual_seed(1)
    parameters = 3 * torch.randn(5, 7, spec.policy_size, generator=generator)
    action = actions.choose(parameters, actions.noise(5 * 7, generator).view(5, 7, -1))
    assert action.shape == (5, 7, *actions.shape)
    entries = action.unsqueeze(-1) if not actions.shape else action
    theirs = parts_of(spec, parameters)
    expected = sum(each.log_prob(entries[..., number]) for number, each in enumerate(theirs))
    torch.testing.assert_close(actions.log_prob(parameters, action), expected)
    torch.testing.assert_close(actions.entropy(parameters), sum(each.entropy() for each in theirs))


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_choose_draws_with_the_probabilities_of_log_prob(tree: Any) -> None:
    actions, spec = make_actions(tree)
    rows = 20_000
    parameters = torch.randn(spec.policy_size, generator=torch.Generator().manual_seed(2)).expand(rows, -1)
    action = actions.choose(parameters, actions.noise(rows, torch.Generator().manual_seed(3)))
    entries = action.unsqueeze(-1) if not actions.shape else action
    for number, theirs in enumerate(parts_of(spec, parameters[:1])):
        drawn = entries[:, number]
        if isinstance(theirs, Categorical):
            shares = torch.bincount(drawn.long(), minlength=theirs.probs.shape[-1]) / rows
            torch.testing.assert_close(shares, theirs.probs[0], atol=0.015, rtol=0)
        else:
            torch.testing.assert_close(drawn.mean(), theirs.mean[0], atol=0.05, rtol=0.02)
            torch.testing.assert_close(drawn.std(), theirs.stddev[0], atol=0.02, rtol=0.03)


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_choose_without_noise_is_the_most_likely_action(tree: Any) -> None:
    actions, spec = make_actions(tree)
    parameters = torch.randn(9, spec.policy_size, generator=torch.Generator().manual_seed(4))
    greedy = actions.choose(parameters, torch.zeros_like(actions.noise(9, torch.Generator())))
    for seed in range(20):
        other = actions.choose(parameters, actions.noise(9, torch.Generator().manual_seed(seed)))
        assert (actions.log_prob(parameters, greedy) >= actions.log_prob(parameters, other)).all()


def test_to_env_returns_the_tree_that_the_environments_take() -> None:
    actions, _ = make_actions(TREES["dict"])
    found = actions.to_env(np.array([[2, -1, -1, 1, 4]], np.float32))
    assert isinstance(found, dict)
    assert {name: leaf.tolist() for name, leaf in found.items()} == {
        "jump": [2],
        "move": [[-2.0, 0.0]],
        "keys": [[1, 4]],
    }


@pytest.mark.parametrize(("squash", "unit"), [(False, 1.0), (True, np.tanh(1.5))])
def test_to_env_brings_gaussian_actions_within_their_bounds(squash: bool, unit: float) -> None:
    actions, _ = make_actions(BOX, squash)
    found = actions.to_env(np.array([[1.5, -1.5], [0.0, 0.0]], np.float32))
    np.testing.assert_allclose(found, [[2 * unit, 5 - 5 * unit], [0.0, 5.0]], rtol=1e-6)


def test_to_env_leaves_gaussian_actions_without_bounds_as_drawn() -> None:
    actions, _ = make_actions(ContinuousSpec((-INFINITY, 1.0), (INFINITY, INFINITY), (2,)))
    np.testing.assert_allclose(actions.to_env(np.array([[7.5, -3.0]], np.float32)), [[7.5, 1.0]])


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_to_env_of_torch_equals_to_env_of_numpy(tree: Any, squash: bool) -> None:
    """Serving converts numpy arrays; an exported policy converts tensors."""
    actions, spec = make_actions(tree, squash)
    parameters = torch.randn(50, spec.policy_size, generator=torch.Generator().manual_seed(1))
    action = actions.choose(parameters, actions.noise(50, torch.Generator().manual_seed(2)))
    on_host, in_graph = leaves(actions.to_env(action.numpy())), leaves(actions.to_env(action))
    for array, tensor, leaf in zip(on_host, in_graph, spec.actions, strict=True):
        assert array.shape == tensor.shape == (50, *leaf.shape)
        assert array.dtype.name == leaf.dtype == str(tensor.dtype).removeprefix("torch.")
        np.testing.assert_allclose(tensor.numpy(), array, rtol=0, atol=1e-6 if squash else 0)  # tanh may be rounded


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_features_tell_actions_apart(tree: Any) -> None:
    actions, spec = make_actions(tree)
    drawn = actions.choose(torch.zeros(50, spec.policy_size), actions.noise(50, torch.Generator().manual_seed(5)))
    features = actions.features(drawn)
    assert features.shape == (50, actions.feature_size)
    assert len(features.unique(dim=0)) == len(drawn.unique(dim=0))


# Log standard deviations that have left their range


def descend(loss: Callable[[Tensor], Tensor], log_std: float, steps: int) -> list[float]:
    """Train a log standard deviation with Adam on a loss of the parameters [100, 2]; return its value at each step."""
    weight = torch.nn.Parameter(torch.tensor(log_std))
    optimizer = torch.optim.Adam([weight], lr=0.01)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss(torch.stack([torch.zeros(100), weight.expand(100)], dim=-1)).backward()
        optimizer.step()
        seen.append(weight.item())
    return seen


@pytest.mark.parametrize(("start", "deviation"), [(MAX_LOG_STD + 0.5, 0.1), (MIN_LOG_STD - 0.5, 0.02)])
def test_log_std_outside_of_its_range_comes_back_to_where_the_loss_leads(start: float, deviation: float) -> None:
    actions, _ = make_actions(ContinuousSpec((-1.0,), (1.0,), (1,)))
    good = deviation * torch.randn(100, 1, generator=torch.Generator().manual_seed(1))
    seen = descend(lambda parameters: -actions.log_prob(parameters, good).mean(), start, steps=1500)
    assert seen[-1] == pytest.approx(float(good.square().mean().sqrt().log()), abs=0.02)


@pytest.mark.parametrize(("sign", "bound"), [(1.0, MAX_LOG_STD), (-1.0, MIN_LOG_STD)])
def test_log_std_with_an_entropy_bonus_alone_stays_near_its_bound(sign: float, bound: float) -> None:
    actions, _ = make_actions(ContinuousSpec((-1.0,), (1.0,), (1,)))
    seen = descend(lambda parameters: -sign * 0.01 * actions.entropy(parameters).mean(), bound - sign, steps=3000)
    assert abs(seen[-1] - bound) < 0.2  # the momentum of Adam carries it some ten steps further
    assert max(abs(value) for value in seen) < abs(bound) + 0.2


def test_log_std_of_a_network_that_outputs_it_comes_back_too() -> None:
    actions, _ = make_actions(ContinuousSpec((-1.0,), (1.0,), (1,)))
    torch.manual_seed(1)
    network, features = torch.nn.Linear(3, 2), torch.randn(64, 3)
    torch.nn.init.constant_(network.bias, 2 * MAX_LOG_STD)
    torch.nn.init.uniform_(network.weight, -0.1, 0.1)
    assert network(features)[:, 1].min() > MAX_LOG_STD
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(500):
        optimizer.zero_grad()
        (-actions.log_prob(network(features), torch.zeros(64, 1)).mean()).backward()
        optimizer.step()
    assert network(features)[:, 1].max() < MAX_LOG_STD


def test_log_std_inside_of_its_range_has_the_values_and_gradients_of_a_clamp() -> None:
    ours, theirs = (torch.linspace(MIN_LOG_STD, MAX_LOG_STD, 50).requires_grad_() for _ in range(2))
    (bounded_log_std(ours).square().sum()).backward()
    (theirs.clamp(MIN_LOG_STD, MAX_LOG_STD).square().sum()).backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)
    outside = torch.tensor([-9.0, 9.0])
    assert bounded_log_std(outside.requires_grad_()).tolist() == bounded_log_std(outside.detach()).tolist() == [-5, 2]


# Exploration, compared with probabilities


def probabilities(actions: Actions, parameters: torch.Tensor, choices: list[Any]) -> torch.Tensor:
    """Return the probability of each of these actions for one row of parameters."""
    taken = torch.tensor(choices)
    return actions.log_prob(parameters.expand(len(choices), -1), taken).exp()


@pytest.mark.parametrize("temperature", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_explored_choices_have_the_probabilities_of_a_mixture(temperature: float, epsilon: float) -> None:
    actions = Actions(EnvSpec(OBSERVATION, discrete(4)))
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.0]])
    found = actions.explored(logits, torch.tensor([temperature]), torch.tensor([epsilon]))
    expected = (1 - epsilon) * torch.softmax(logits[0].double() / temperature, 0) + epsilon / 4
    torch.testing.assert_close(probabilities(actions, found, [0, 1, 2, 3]).double(), expected, rtol=1e-5, atol=1e-6)


def test_explored_choices_that_are_forbidden_stay_so() -> None:
    actions = Actions(EnvSpec(OBSERVATION, discrete(4)))
    logits = torch.tensor([[0.0, FORBIDDEN, 1.0, FORBIDDEN]])
    found = actions.explored(logits, torch.tensor([2.0]), torch.tensor([0.5]))
    expected = 0.5 * torch.softmax(torch.tensor([0.0, 0.5]), 0) + 0.5 / 2
    torch.testing.assert_close(probabilities(actions, found, [0, 2]), expected)
    assert probabilities(actions, found, [1, 3]).tolist() == [0.0, 0.0]
    assert torch.isfinite(found).all()


def test_explored_rows_are_explored_each_by_itself() -> None:
    actions = Actions(EnvSpec(OBSERVATION, discrete(3)))
    logits = torch.tensor([[0.0, 1.0, 2.0]] * 3)
    found = actions.explored(logits, torch.tensor([1.0, 0.5, 1.0]), torch.tensor([0.0, 0.0, 1.0])).softmax(-1)
    torch.testing.assert_close(found[0], logits[0].softmax(-1))
    torch.testing.assert_close(found[1], (2 * logits[1]).softmax(-1))
    torch.testing.assert_close(found[2], torch.full((3,), 1 / 3))


def test_explored_gaussian_has_a_scaled_deviation_and_the_same_mean() -> None:
    actions = Actions(EnvSpec(OBSERVATION, ContinuousSpec((-1.0, -1.0), (1.0, 1.0), (2,))))
    parameters = torch.tensor([[0.3, -0.4, -1.0, 9.0]])  # the last standard deviation is clamped to exp(2)
    found = actions.explored(parameters, torch.tensor([0.5]), torch.tensor([0.9]))
    expected = torch.distributions.Normal(torch.tensor([0.3, -0.4]), 0.5 * torch.tensor([-1.0, 2.0]).exp())
    taken = torch.tensor([[0.1, 0.7]])
    torch.testing.assert_close(actions.log_prob(found, taken), expected.log_prob(taken).sum(-1))
    noise = torch.tensor([[1.0, -2.0]])
    torch.testing.assert_close(actions.choose(found, noise), (expected.mean + expected.stddev * noise[0])[None])


def test_explored_at_temperature_one_and_epsilon_zero_changes_no_probability() -> None:
    spec = EnvSpec(OBSERVATION, {"go": CategoricalSpec((3, 2), (2,)), "push": ContinuousSpec((-1.0,), (1.0,), (1,))})
    actions = Actions(spec)
    parameters = torch.randn(5, spec.policy_size, generator=torch.Generator().manual_seed(1))
    taken = actions.choose(parameters, actions.noise(5, torch.Generator().manual_seed(2)))
    found = actions.explored(parameters, torch.ones(5), torch.zeros(5))
    torch.testing.assert_close(actions.log_prob(found, taken), actions.log_prob(parameters, taken))
