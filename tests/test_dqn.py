"""Q-learning from replay: against slow transcriptions, on chains of known values, and on what inference recorded."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms.bootstrap import TargetNetwork, n_step, priority_of
from seedrl.algorithms.dqn import DQN, action_values, rescaled, unscaled
from seedrl.algorithms.settings import AlgorithmConfig, DQNConfig
from seedrl.algorithms.transitions import transitions
from seedrl.config import ModelConfig
from seedrl.errors import ConfigError
from seedrl.models.base import FORBIDDEN
from seedrl.models.build import build_model
from seedrl.specs import CategoricalSpec, ContinuousSpec, EnvSpec
from seedrl.types import ModelInput, ModelOutput, Recorded, Unrolls
from tests.builders import learner_parts, one_step, same, weights
from tests.fakes import FakePool, TinyModel, make_job, make_spec
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
    slow_returns,
    to_unrolls,
)
from tests.rig import Rig

torch.set_num_threads(1)  # for tensors this small a second thread only waits

PERIOD = 5


def settings(**own: Any) -> AlgorithmConfig:
    return one_step(name="dqn", discount=DISCOUNT, dqn=DQNConfig(**{"target_period": PERIOD, **own}))


# Returns.


def random_case(seed: int) -> dict[str, Array]:
    case = random_ends(seed)
    length, batch = case["reward"].shape
    return {**case, "value": np.random.default_rng([seed, 1]).normal(size=(length + 1, batch))}


def returns_of(case: dict[str, Array], steps: int) -> Array:
    found: Array = n_step(
        reward_tp1=torch.from_numpy(case["reward"]),
        discount_tp1=torch.from_numpy(case["gamma"]),
        value=torch.from_numpy(case["value"]),
        valid_t=torch.from_numpy(case["valid"]),
        steps=steps,
    ).numpy()
    return found


@pytest.mark.parametrize("steps", [1, 3, 20])
@pytest.mark.parametrize("seed", range(5))
def test_n_step_random_ends_equals_a_walk_forward(seed: int, steps: int) -> None:
    case = random_case(seed)
    valid = case["valid"].astype(bool)
    np.testing.assert_allclose(returns_of(case, steps)[valid], slow_returns(case, steps)[valid], rtol=1e-12, atol=1e-12)


def test_n_step_chain_has_its_closed_form() -> None:
    """Rewards of 1 and values of 10: (1 - gamma^n) / (1 - gamma) + 10 gamma^n, with n the steps that are left."""
    length, gamma, steps = 6, 0.9, 4
    ones = np.ones((length, 1))
    value = np.full((length + 1, 1), 10.0)
    case = {"reward": ones, "gamma": gamma * ones, "value": value, "valid": ones.astype(bool)}
    left = np.minimum(steps, length - np.arange(length))
    np.testing.assert_allclose(returns_of(case, steps)[:, 0], (1 - gamma**left) / (1 - gamma) + value[0] * gamma**left)


# The scale of values, the dueling heads, priorities.


def h(x: float) -> float:
    return float(np.sign(x) * (np.sqrt(abs(x) + 1) - 1) + 1e-3 * x)


def h_inverse(y: float) -> float:
    root = (np.sqrt(1 + 4e-3 * (abs(y) + 1 + 1e-3)) - 1) / 2e-3
    return float(np.sign(y) * (root**2 - 1))


def test_unscaled_inverts_rescaled_for_numbers_of_any_size() -> None:
    x = torch.cat([torch.logspace(-4, 5, 40), -torch.logspace(-4, 5, 40), torch.zeros(1)])
    y = rescaled(x)
    np.testing.assert_allclose(y, [h(each) for each in x.tolist()], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(unscaled(y), [h_inverse(each) for each in y.tolist()], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(unscaled(y), x, rtol=1e-5, atol=1e-6)


def test_action_values_have_the_mean_of_the_value_head_and_the_order_of_the_logits() -> None:
    output = ModelOutput(torch.randn(4, 3, 5), torch.randn(4, 3))
    q = action_values(output)
    torch.testing.assert_close(q.mean(dim=-1), output.value)
    assert torch.equal(q.argmax(dim=-1), output.logits.argmax(dim=-1))


def test_action_values_of_masked_choices_are_those_of_what_is_allowed_alone() -> None:
    logits = torch.tensor([[[5.0, FORBIDDEN, 1.0], [FORBIDDEN] * 3]])
    q = action_values(ModelOutput(logits, torch.tensor([[10.0, 10.0]])))
    assert q.tolist() == [[[12.0, FORBIDDEN, 8.0], [FORBIDDEN] * 3]]


def test_priority_is_a_share_of_the_largest_error_and_the_rest_of_the_mean() -> None:
    error = torch.tensor([[1.0, 0.0], [0.0, 0.0], [5.0, 0.0]])
    valid = torch.tensor([[True, False], [False, False], [True, False]])
    torch.testing.assert_close(priority_of(error, valid, eta=0.9), torch.tensor([0.9 * 5 + 0.1 * 3, 0.0]))


# Episode ends, on a chain whose values are known.


class Table(nn.Module):
    """The value of every position, the same for both actions."""

    core_size = 0

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values.clone())

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        value = inputs.observation @ self.values
        return ModelOutput(value.new_zeros(*value.shape, 2), value), core_state


def make_dqn(model: nn.Module, num_actions: int = 2, **own: Any) -> DQN:
    return DQN(settings(**own), Actions(make_spec(num_actions=num_actions)), model)


def learned_values(unrolls: Unrolls, **own: Any) -> Tensor:
    """The table [END + 1] that training on these unrolls converges to."""
    table = Table(torch.full((END + 1,), UNTRAINED))
    learn(make_dqn(table, **own), table, unrolls, steps=150)
    return table.values.detach()


@pytest.mark.parametrize("steps", [1, 3])
def test_loss_chain_with_time_limit_learns_the_values_without_it(steps: int) -> None:
    assert_values(learned_values(to_unrolls(chain_rows(300)), n_steps=steps))


def test_loss_chain_is_learned_on_another_scale() -> None:
    learned = learned_values(to_unrolls(chain_rows(300)), rescale=True)
    torch.testing.assert_close(learned[:END], rescaled(VALUES), rtol=0, atol=1e-3)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_loss_mistaken_episode_ends_learn_other_values(mistake: Mistake) -> None:
    learned = learned_values(to_unrolls(mistake(chain_rows(300))))
    assert (learned[:END] - VALUES).abs().max() > 0.3


# The loss, in plain loops.


class Given(nn.Module):
    """A model that outputs its weights, whatever the input is."""

    core_size = 0

    def __init__(self, rows: int, batch: int, actions: int, seed: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.logits = nn.Parameter(torch.randn(rows, batch, actions, dtype=torch.float64, generator=generator))
        self.value = nn.Parameter(torch.randn(rows, batch, dtype=torch.float64, generator=generator))

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        return ModelOutput(self.logits, self.value), core_state


def slow_q(model: Given) -> Array:
    logits, value = model.logits.detach().numpy(), model.value.detach().numpy()
    return value[..., None] + logits - logits.mean(-1, keepdims=True)


@pytest.mark.parametrize("is_rescaled", [False, True])
def test_loss_priorities_and_gradient_equal_a_transcription_in_loops(is_rescaled: bool) -> None:
    """Double Q-learning: the trained network chooses, the target network values; unrolls have weights."""
    steps, eta, (rows, batch, actions) = 2, 0.7, (6, 4, 3)
    unrolls = random_unrolls(seed=3)._replace(weight=torch.tensor([1.0, 0.5, 2.0, 0.1], dtype=torch.float64))
    model = Given(rows, batch, actions)
    algorithm = make_dqn(model, actions, n_steps=steps, eta=eta, rescale=is_rescaled)
    list(algorithm.batches(unrolls))
    target_q = slow_q(model)  # from before the weights changed
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), Given(rows, batch, actions, seed=2).parameters(), strict=True):
            parameter.copy_(other)
    loss = algorithm.loss(unrolls, model, 0.0)
    loss.total.backward()

    q, step = slow_q(model), transitions(unrolls, settings())
    scale, inverse = (h, h_inverse) if is_rescaled else (float, float)
    value = np.array([[inverse(target_q[t, b, q[t, b].argmax()]) for b in range(batch)] for t in range(rows)])
    case = {
        "reward": step.reward_tp1.numpy(),
        "gamma": step.discount_tp1.double().numpy(),
        "value": value,
        "valid": step.valid_t.numpy(),
    }
    returns, count = slow_returns(case, steps), int(step.valid_t.sum())
    total, errors, gradient = 0.0, [list[float]() for _ in range(batch)], np.zeros((rows, batch))
    for t in range(rows - 1):
        for b in range(batch):
            if step.valid_t[t, b]:
                error = scale(returns[t, b]) - q[t, b, int(step.action_t[t, b])]
                total += 0.5 * float(unrolls.weight[b]) * error**2 / count
                gradient[t, b] = -float(unrolls.weight[b]) * error / count
                errors[b].append(abs(error))
    assert loss.total.item() == pytest.approx(total, rel=1e-6)
    np.testing.assert_allclose(model.value.grad, gradient, rtol=1e-5, atol=1e-9)
    expected = [eta * max(each) + (1 - eta) * sum(each) / len(each) for each in errors]
    assert loss.priority is not None
    np.testing.assert_allclose(loss.priority, expected, rtol=1e-6)


# Initial priorities.


def recorded_of(unrolls: Unrolls, value: Tensor) -> Recorded:
    return Recorded(
        unrolls.inputs.reward,
        unrolls.terminated,
        unrolls.truncated,
        unrolls.action,
        unrolls.behavior_logits,
        behavior_value=value,
    )


@pytest.mark.parametrize("is_rescaled", [False, True])
def test_initial_priority_equals_a_transcription_in_loops(is_rescaled: bool) -> None:
    unrolls, value = random_unrolls(seed=5), Given(6, 4, 3).value.detach()
    algorithm = make_dqn(Given(6, 4, 3), 3, n_steps=2, eta=0.7, rescale=is_rescaled)
    step = transitions(unrolls, settings())
    scale, inverse = (h, h_inverse) if is_rescaled else (float, float)
    case = {
        "reward": step.reward_tp1.numpy(),
        "gamma": step.discount_tp1.double().numpy(),
        "value": np.vectorize(inverse)(value.numpy()),
        "valid": step.valid_t.numpy(),
    }
    error = np.abs(np.vectorize(scale)(slow_returns(case, 2)) - value.numpy()[:-1])
    errors = [error[:, b][case["valid"][:, b].astype(bool)] for b in range(4)]
    expected = [0.7 * each.max() + 0.3 * each.mean() for each in errors]
    np.testing.assert_allclose(algorithm.initial_priority(recorded_of(unrolls, value)), expected, rtol=1e-6)


def test_initial_priority_of_true_values_is_zero_and_leaves_burn_in_out() -> None:
    unrolls = to_unrolls(chain_rows(300))
    true = unrolls.inputs.observation @ torch.cat([VALUES, torch.tensor([UNTRAINED])])
    algorithm = make_dqn(TinyModel(make_spec(num_actions=2), core_size=2), n_steps=1, burn_in=1)
    assert algorithm.initial_priority(recorded_of(unrolls, true)).max() < 1e-5
    wrong_at_first = torch.cat([true[:1] + 1, true[1:]])
    assert algorithm.initial_priority(recorded_of(unrolls, wrong_at_first)).max() < 1e-5
    wrong = torch.cat([true[:1], true[1:] + 1])
    assert algorithm.initial_priority(recorded_of(unrolls, wrong)).max() > 0.09  # 1 - discount, or 1 before an end


# The target network.


def test_target_network_begins_with_the_weights_of_the_run_and_follows_every_few_steps() -> None:
    unrolls, model = to_unrolls(chain_rows(60)), Table(torch.zeros(END + 1))
    algorithm = make_dqn(model)
    with torch.no_grad():
        model.values.fill_(1.0)  # as if loaded from another run after the algorithm was built
    (batch,) = algorithm.batches(unrolls)
    loss = algorithm.loss(batch, model, 0.0)
    seen = []
    for number in range(2 * PERIOD):
        with torch.no_grad():
            model.values.fill_(2.0 + number)
        algorithm.stepped(loss)
        seen.append(algorithm.tensors()["target.values"][0].item())
    assert seen == [1.0] * (PERIOD - 1) + [1.0 + PERIOD] * PERIOD + [1.0 + 2 * PERIOD]


def test_target_network_follows_by_a_share_and_takes_over_buffers() -> None:
    source = nn.BatchNorm1d(2)
    target = TargetNetwork(source)
    with torch.no_grad():
        source.weight.fill_(3.0)
        source.running_mean.fill_(7.0)  # type: ignore[union-attr, operator]
    target.follow(0.25)
    assert target.network.weight.tolist() == [1.5, 1.5]
    assert target.network.running_mean.tolist() == [7.0, 7.0]  # type: ignore[union-attr, operator]
    assert not any(parameter.requires_grad for parameter in target.network.parameters())


def test_tensors_of_a_checkpoint_continue_exactly() -> None:
    unrolls = random_unrolls(seed=4)
    first, second = (Given(6, 4, 3), Given(6, 4, 3, seed=5))
    trained = make_dqn(first, 3)
    loss = trained.loss(next(iter(trained.batches(unrolls))), first, 0.0)
    for _ in range(PERIOD - 1):
        trained.stepped(loss)
    with torch.no_grad():
        first.value.add_(1.0)
    restored = make_dqn(second, 3)
    second.load_state_dict(first.state_dict())
    restored.load({name: tensor.clone() for name, tensor in trained.tensors().items()})
    for algorithm, model in ((trained, first), (restored, second)):
        algorithm.stepped(algorithm.loss(next(iter(algorithm.batches(unrolls))), model, 0.0))
    assert same(trained.tensors(), restored.tensors())


# Burn-in.


@pytest.mark.parametrize("burn_in", [1, 2])
def test_burn_in_ends_with_the_core_state_that_inference_had(burn_in: int) -> None:
    """With the weights that acted, the rows after burn-in have the values that inference computed, across episodes."""
    pool = FakePool(make_job(2), episode_length=7)
    model = TinyModel(pool.spec, core_size=3)
    algorithm = make_dqn(model, pool.spec.policy_size, burn_in=burn_in)
    assert algorithm.overlap == burn_in + 1
    rig = Rig(pool.spec, model, slots=2, unroll_length=6, overlap=algorithm.overlap)
    rig.play(rig.join([0, 1]), pool, steps=40)
    unrolls = rig.store.take(rig.store.ready, timeout=0)
    assert unrolls is not None
    assert unrolls.columns > 8
    seen: list[ModelOutput] = []

    def forward(inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        output, core_state = model(inputs, core_state)
        seen.append(output)
        return output, core_state

    algorithm.loss(unrolls, forward, 0.0)
    (output,) = seen  # burn-in itself has no gradient, and its rows are not trained on
    torch.testing.assert_close(output.logits, unrolls.behavior_logits[burn_in:], rtol=0, atol=1e-6)
    torch.testing.assert_close(output.value, unrolls.behavior_value[burn_in:], rtol=0, atol=1e-6)
    assert algorithm.valid(unrolls).shape == (6 - burn_in, unrolls.columns)


def test_burn_in_trains_every_transition_of_consecutive_unrolls_once() -> None:
    pool = FakePool(make_job(1), episode_length=100)
    algorithm = make_dqn(TinyModel(pool.spec, core_size=3), pool.spec.policy_size, burn_in=2)
    rig = Rig(pool.spec, TinyModel(pool.spec, core_size=3), slots=1, unroll_length=6, overlap=algorithm.overlap)
    rig.play(rig.join([0]), pool, steps=31)
    unrolls = rig.store.take(rig.store.ready, timeout=0)
    assert unrolls is not None
    begins = unrolls.inputs.observation[2:-1, :, 1].T.flatten()  # the number of each row that a transition begins at
    assert begins.tolist() == list(range(2, 30))


def test_burn_in_is_left_out_without_a_memory() -> None:
    assert make_dqn(TinyModel(make_spec()), 3, burn_in=2).overlap == 1


# With a learner.


@pytest.mark.parametrize("lstm", [0, 4])
def test_train_changes_all_weights_and_hands_priorities_over(lstm: int) -> None:
    spec = make_spec((4,))
    network = build_model(ModelConfig(layers=[8], lstm=lstm, popart=False, normalize=False), spec, seed=1)
    parts = learner_parts(settings(burn_in=1), network, spec)
    preferred = []
    parts.learner._prefer = lambda ticket, priority: preferred.append((ticket, priority))
    parts.record()
    before = weights(network)
    assert parts.update()
    assert [name for name, tensor in weights(network).items() if torch.equal(tensor, before[name])] == []
    ((ticket, priority),) = preferred
    assert len(ticket.entry) == len(priority) == 2
    assert set(parts.metrics.algorithm) == {
        *("loss", "q_loss", "mean_q", "mean_error", "max_target", "value_share", "explained_variance"),
    }
    assert parts.metrics.trained_steps == (4 if lstm else 6)
    assert parts.metrics.unroll_uses == 2


@pytest.mark.parametrize("action", [CategoricalSpec((3, 3), (2,)), ContinuousSpec((-1.0,), (1.0,), (1,))])
def test_build_actions_other_than_one_choice_are_refused(action: Any) -> None:
    spec = EnvSpec(make_spec().observation, action)
    with pytest.raises(ConfigError, match="a single discrete choice"):
        DQN(settings(), Actions(spec), TinyModel(spec))
