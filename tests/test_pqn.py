"""Q(lambda) against its definition and in closed form, the loss of PQN, and that it learns."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms.minibatches import Rows
from seedrl.algorithms.pqn import PQN, best_value, q_lambda
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.algorithms.transitions import transitions
from seedrl.config import ModelConfig
from seedrl.errors import ConfigError
from seedrl.models.base import FORBIDDEN
from seedrl.models.build import build_model
from seedrl.specs import CategoricalSpec, ContinuousSpec, EnvSpec
from seedrl.types import ModelInput, ModelOutput, Unrolls
from tests.builders import learner_parts, one_step, same, weights
from tests.fakes import TinyModel, make_spec
from tests.oracles import (
    DISCOUNT,
    END,
    MISTAKES,
    UNTRAINED,
    VALUES,
    Array,
    Mistake,
    assert_values,
    chain_rows,
    learn,
    random_ends,
    random_unrolls,
    to_unrolls,
)

torch.set_num_threads(1)  # for tensors this small a second thread only waits


def settings(**changes: Any) -> AlgorithmConfig:
    return one_step(**{"name": "pqn", "discount": DISCOUNT, "trace_lambda": 0.7, **changes})


# Targets.


def lambda_return(reward: Array, gamma: Array, best: Array, trace_lambda: float) -> float:
    """The forward view, for the first of some consecutive transitions: a mean of n-step returns.

    G = (1 - lambda) sum_{n=1}^{N-1} lambda^(n-1) G^(n) + lambda^(N-1) G^(N), where
    G^(n) = r_1 + gamma_1 r_2 + … + gamma_1 … gamma_n max Q(x_n)
    """
    returns = []
    for n in range(1, len(reward) + 1):
        value = best[n - 1]
        for k in reversed(range(n)):
            value = reward[k] + gamma[k] * value
        returns.append(value)
    last = len(returns) - 1
    shares = [(1 - trace_lambda) * trace_lambda**n for n in range(last)] + [trace_lambda**last]
    return float(np.dot(shares, returns))


def expected_targets(case: dict[str, Array], trace_lambda: float) -> Array:
    """The targets of valid rows; a trace ends before the next row that is not valid."""
    reward, gamma, best, valid = (case[name] for name in ("reward", "gamma", "best", "valid"))
    target = np.full_like(reward, np.nan)
    for b in range(reward.shape[1]):
        for t in np.flatnonzero(valid[:, b]):
            after = np.flatnonzero(~valid[t:, b])
            piece = slice(t, t + after[0] if len(after) else None)
            target[t, b] = lambda_return(reward[piece, b], gamma[piece, b], best[piece, b], trace_lambda)
    return target


def random_case(seed: int) -> dict[str, Array]:
    case = random_ends(seed)
    return {**case, "best": np.random.default_rng([seed, 1]).normal(size=case["reward"].shape)}


def targets_of(case: dict[str, Array], trace_lambda: float) -> Array:
    found: Array = q_lambda(
        reward_tp1=torch.from_numpy(case["reward"]),
        discount_tp1=torch.from_numpy(case["gamma"]),
        best_tp1=torch.from_numpy(case["best"]),
        valid_t=torch.from_numpy(case["valid"]),
        trace_lambda=trace_lambda,
    ).numpy()
    return found


@pytest.mark.parametrize("trace_lambda", [0.0, 0.65, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_q_lambda_random_ends_equals_the_forward_view(seed: int, trace_lambda: float) -> None:
    case = random_case(seed)
    expected = expected_targets(case, trace_lambda)
    found = np.where(case["valid"], targets_of(case, trace_lambda), np.nan)
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_q_lambda_chain_has_its_closed_form() -> None:
    """Rewards of 1 and values of 0: G_t = sum of (gamma lambda)^k over the steps that are left."""
    length, gamma, trace_lambda = 6, 0.9, 0.5
    ones = np.ones((length, 1))
    case = {"reward": ones, "gamma": gamma * ones, "best": 0 * ones, "valid": ones.astype(bool)}
    ratio = gamma * trace_lambda
    expected = [(1 - ratio ** (length - t)) / (1 - ratio) for t in range(length)]
    np.testing.assert_allclose(targets_of(case, trace_lambda)[:, 0], expected)


def test_q_lambda_at_zero_is_one_step_and_at_one_is_the_return() -> None:
    case = {name: array.astype(bool) if name == "valid" else array for name, array in random_case(0).items()}
    case["valid"][:] = True
    np.testing.assert_allclose(targets_of(case, 0.0), case["reward"] + case["gamma"] * case["best"])
    total = case["best"][-1]
    for t in reversed(range(len(case["reward"]))):
        total = case["reward"][t] + case["gamma"][t] * total
    np.testing.assert_allclose(targets_of(case, 1.0)[0], total)


# Episode ends, on a chain whose values are known.


class Table(nn.Module):
    """The value of both actions in every position."""

    core_size = 0

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values.clone())

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        value = inputs.observation @ self.values
        return ModelOutput(value.unsqueeze(-1).expand(*value.shape, 2), value), core_state


def make_pqn(model: nn.Module, num_actions: int = 2, **changes: Any) -> PQN:
    return PQN(settings(**changes), Actions(make_spec(num_actions=num_actions)), model)


def learned_values(unrolls: Unrolls) -> Tensor:
    """The table [END + 1] that training on these unrolls converges to."""
    table = Table(torch.full((END + 1,), UNTRAINED))
    learn(make_pqn(table), table, unrolls, steps=120)
    return table.values.detach()


def test_loss_chain_with_time_limit_learns_the_values_without_it() -> None:
    assert_values(learned_values(to_unrolls(chain_rows(300))))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_loss_mistaken_episode_ends_learn_other_values(mistake: Mistake) -> None:
    learned = learned_values(to_unrolls(mistake(chain_rows(300))))
    assert (learned[:END] - VALUES).abs().max() > 0.3


def test_loss_true_values_have_no_loss_whatever_lambda_is() -> None:
    table = Table(torch.cat([VALUES, torch.tensor([UNTRAINED])]))
    for trace_lambda in (0.0, 0.5, 1.0):
        algorithm = make_pqn(table, trace_lambda=trace_lambda)
        (batch,) = algorithm.batches(to_unrolls(chain_rows(300)))
        loss = algorithm.loss(batch, table, 0.0)
        assert loss.report["q_loss"] < 1e-9
        assert loss.report["explained_variance"] > 0.999
        assert loss.report["max_target"] == pytest.approx(float(VALUES.max()), abs=1e-4)


# The loss.


class Given(nn.Module):
    """A model that outputs the same logits for every batch; they are its weights."""

    core_size = 0

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        logits = self.logits[: inputs.reward.shape[0]] if inputs.reward.shape[0] > 1 else self._in_one_row()
        return ModelOutput(logits, logits[..., 0]), core_state

    def _in_one_row(self) -> Tensor:
        return self.logits[:-1].flatten(0, 1).unsqueeze(0)


def test_loss_gradient_is_the_error_of_the_actions_taken_over_valid_transitions() -> None:
    unrolls = random_unrolls(seed=3)
    model = Given(torch.randn(6, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    algorithm = make_pqn(model, num_actions=3)
    (batch,) = algorithm.batches(unrolls)
    loss = algorithm.loss(batch, model, 0.0)
    loss.total.backward()

    step = transitions(unrolls, settings())
    case = {
        "reward": step.reward_tp1.numpy(),
        "gamma": step.discount_tp1.double().numpy(),
        "best": model.logits.detach()[1:].amax(-1).numpy(),
        "valid": step.valid_t.numpy(),
    }
    target = torch.from_numpy(np.nan_to_num(expected_targets(case, 0.7)))
    q = model.logits.detach()[:-1].gather(-1, step.action_t.unsqueeze(-1)).squeeze(-1)
    error = torch.where(step.valid_t, q - target, 0.0) / step.valid_t.sum()
    expected = torch.zeros(6, 4, 3, dtype=torch.float64)
    expected[:-1].scatter_(-1, step.action_t.unsqueeze(-1), error.unsqueeze(-1))
    assert model.logits.grad is not None
    torch.testing.assert_close(model.logits.grad, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(loss.report["mean_q"].double(), q[step.valid_t].mean(), rtol=1e-5, atol=1e-7)


def test_best_value_of_masked_choices_is_that_of_the_best_allowed_one() -> None:
    logits = torch.tensor([[5.0, -2.0, 1.0], [FORBIDDEN, -2.0, -3.0], [FORBIDDEN] * 3])
    assert best_value(logits).tolist() == [5.0, -2.0, 0.0]


@pytest.mark.parametrize("core_size", [0, 3])
def test_batches_hold_every_transition_once_a_pass_and_whole_unrolls_if_there_is_memory(core_size: int) -> None:
    spec = make_spec()
    parts = learner_parts(settings(passes=2, minibatches=2), TinyModel(spec, core_size), spec, batch_size=4)
    parts.record()
    unrolls = parts.store.take(4, timeout=0)
    assert unrolls is not None
    algorithm = PQN(parts.config.algorithm, Actions(spec), parts.learner.model)
    batches: Iterator[Rows] = algorithm.batches(unrolls)
    shapes = [tuple(batch.given["target"].shape) for batch in batches]
    assert shapes == ([(3, 2)] * 4 if core_size else [(1, 6)] * 4)


@pytest.mark.parametrize("model", [ModelConfig(layers=[8], layer_norm=True), ModelConfig(layers=[8], lstm=4)])
def test_train_changes_all_weights_but_those_of_the_value_head(model: ModelConfig) -> None:
    spec = make_spec((4,))
    network = build_model(ModelConfig(**{**vars(model), "popart": False, "normalize": False}), spec, seed=1)
    parts = learner_parts(settings(passes=2, minibatches=2), network, spec)
    parts.record()
    before = weights(network)
    assert parts.update()
    after = weights(network)
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged == {"value_head.weight", "value_head.bias"}
    assert set(parts.metrics.algorithm) == {
        *("loss", "q_loss", "mean_q", "max_target", "value_share", "explained_variance"),
    }
    assert not same(before, after)


def test_tensors_order_of_minibatches_continues_after_load() -> None:
    unrolls = to_unrolls(chain_rows(60))
    table = Table(torch.zeros(END + 1))
    first, second = (make_pqn(table, passes=1, minibatches=3) for _ in range(2))
    list(first.batches(unrolls))
    second.load(first.tensors())
    for ours, theirs in zip(first.batches(unrolls), second.batches(unrolls), strict=True):
        assert torch.equal(ours.given["target"], theirs.given["target"])


@pytest.mark.parametrize("action", [CategoricalSpec((3, 3), (2,)), ContinuousSpec((-1.0,), (1.0,), (1,))])
def test_build_actions_other_than_one_choice_are_refused(action: Any) -> None:
    spec = EnvSpec(make_spec().observation, action)
    with pytest.raises(ConfigError, match="a single discrete choice"):
        PQN(settings(), Actions(spec), TinyModel(spec))
