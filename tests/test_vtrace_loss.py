"""Episode ends as the loss sees them (invariant 7), on a chain whose values are known, and the parts of the loss."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms import vtrace as algorithm
from seedrl.algorithms.actor_critic import RewardBound
from seedrl.algorithms.base import Loss
from seedrl.algorithms.settings import AlgorithmConfig, VTraceConfig
from seedrl.algorithms.transitions import shaped_reward
from seedrl.algorithms.vtrace import vtrace
from seedrl.types import ModelOutput, Unrolls
from tests.builders import one_step
from tests.fakes import make_spec
from tests.oracles import (
    DISCOUNT,
    END,
    MISTAKES,
    UNTRAINED,
    VALUES,
    Mistake,
    assert_values,
    chain_rows,
    random_unrolls,
    to_unrolls,
)

torch.set_num_threads(1)  # for tensors this small a second thread only waits

CONFIG = one_step(discount=DISCOUNT, entropy_cost=0.0)


def vtrace_loss(unrolls: Unrolls, output: ModelOutput, config: AlgorithmConfig, entropy_cost: float) -> Loss:
    """Return the loss for a single choice among as many actions as there are logits."""
    actions = Actions(make_spec(num_actions=output.logits.shape[-1]))
    bound = RewardBound(config.discount, nn.Linear(1, 1))
    return algorithm.vtrace_loss(unrolls, output, actions, config, entropy_cost, bound)


def chain_loss(unrolls: Unrolls, table: Tensor) -> Loss:
    """The loss of a uniform policy with this value of every position."""
    value = unrolls.inputs.observation @ table
    return vtrace_loss(unrolls, ModelOutput(torch.zeros_like(unrolls.behavior_logits), value), CONFIG, entropy_cost=0.0)


def learned_values(unrolls: Unrolls) -> Tensor:
    """The table [END + 1] that training on these unrolls converges to."""
    table = torch.full((END + 1,), UNTRAINED, requires_grad=True)
    optimizer = torch.optim.SGD([table], lr=8.0)
    for _ in range(200):
        optimizer.zero_grad()
        chain_loss(unrolls, table).total.backward()
        optimizer.step()
    return table.detach()


def test_vtrace_loss_chain_with_time_limit_learns_the_values_without_it() -> None:
    assert_values(learned_values(to_unrolls(chain_rows(300))))


def test_vtrace_loss_chain_unrolls_have_ends_on_every_row() -> None:
    """The tests around this one rely on it: without such ends they would miss half of the cases."""
    unrolls = to_unrolls(chain_rows(300))
    assert unrolls.terminated.any(dim=1).all()
    assert unrolls.truncated.any(dim=1).all()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_vtrace_loss_mistaken_episode_ends_learn_other_values(mistake: Mistake) -> None:
    """The oracle above has teeth: each classic mistake moves what is learned far beyond its tolerance."""
    learned = learned_values(to_unrolls(mistake(chain_rows(300))))
    assert (learned[:END] - VALUES).abs().max() > 0.3


def test_vtrace_loss_true_values_have_no_value_loss_and_no_advantage() -> None:
    table = torch.cat([VALUES, torch.tensor([UNTRAINED])])
    parts = chain_loss(to_unrolls(chain_rows(300)), table)
    assert parts.report["value_loss"] < 1e-9
    assert abs(parts.report["policy_loss"]) < 1e-5


@pytest.mark.parametrize("mistake", MISTAKES)
def test_vtrace_loss_true_values_of_mistaken_ends_have_a_value_loss(mistake: Mistake) -> None:
    table = torch.cat([VALUES, torch.tensor([UNTRAINED])])
    assert chain_loss(to_unrolls(mistake(chain_rows(300))), table).report["value_loss"] > 0.05


# The parts of the loss, on random unrolls.


def random_output(unrolls: Unrolls, seed: int = 1, requires_grad: bool = False) -> ModelOutput:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(unrolls.behavior_logits.shape, generator=generator, dtype=torch.float64)
    value = torch.randn(unrolls.action.shape, generator=generator, dtype=torch.float64)
    return ModelOutput(logits.requires_grad_(requires_grad), value.requires_grad_(requires_grad))


def disturbed(unrolls: Unrolls, output: ModelOutput, rows: Tensor) -> tuple[Unrolls, ModelOutput]:
    """Other actions, logits, recorded values and versions on these rows."""
    other = random_unrolls(seed=9)
    pick = rows.unsqueeze(-1)
    return (
        unrolls._replace(
            action=torch.where(rows, (unrolls.action + 1) % 3, unrolls.action),
            behavior_logits=torch.where(pick, 50 * other.behavior_logits, unrolls.behavior_logits),
            behavior_value=torch.where(rows, 1e6, unrolls.behavior_value),
            policy_version=np.where(rows.numpy(), 99, unrolls.policy_version),
        ),
        output._replace(logits=torch.where(pick, 50 * random_output(unrolls, seed=8).logits, output.logits)),
    )


def assert_same_loss(one: Loss, other: Loss) -> None:
    assert torch.equal(one.total, other.total)
    for name, value in one.report.items():
        assert torch.equal(value, other.report[name]), f"{name} differs: {value} and {other.report[name]}"


@pytest.mark.parametrize("seed", range(5))
def test_vtrace_loss_ended_rows_policy_and_action_do_not_matter(seed: int) -> None:
    unrolls = random_unrolls(seed=seed)
    output = random_output(unrolls)
    ended = unrolls.terminated | unrolls.truncated
    assert ended[:-1].any()
    expected = vtrace_loss(unrolls, output, CONFIG, entropy_cost=0.1)
    assert_same_loss(vtrace_loss(*disturbed(unrolls, output, ended), CONFIG, entropy_cost=0.1), expected)


def test_vtrace_loss_other_rows_policy_and_action_do_matter() -> None:
    unrolls = random_unrolls()
    output = random_output(unrolls)
    expected = vtrace_loss(unrolls, output, CONFIG, entropy_cost=0.1)
    valid = ~(unrolls.terminated | unrolls.truncated)
    actual = vtrace_loss(*disturbed(unrolls, output, valid), CONFIG, entropy_cost=0.1)
    same = {name for name, value in actual.report.items() if value == expected.report[name]}
    assert same <= {"clipped_rho", "entropy_cost"}
    assert actual.total != expected.total


def test_vtrace_loss_last_row_policy_and_action_do_not_matter() -> None:
    unrolls = random_unrolls()
    output = random_output(unrolls)
    last = torch.zeros_like(unrolls.terminated)
    last[-1] = True
    expected = vtrace_loss(unrolls, output, CONFIG, entropy_cost=0.1)
    assert_same_loss(vtrace_loss(*disturbed(unrolls, output, last), CONFIG, entropy_cost=0.1), expected)


def test_vtrace_loss_reward_of_reset_row_does_not_matter() -> None:
    unrolls = random_unrolls()
    output = random_output(unrolls)
    reward = torch.where(unrolls.inputs.reset, 1e3, unrolls.inputs.reward)
    changed = unrolls._replace(inputs=unrolls.inputs._replace(reward=reward))
    expected = vtrace_loss(unrolls, output, CONFIG, entropy_cost=0.1)
    assert_same_loss(vtrace_loss(changed, output, CONFIG, entropy_cost=0.1), expected)


def test_vtrace_loss_value_of_terminated_row_does_not_matter_of_truncated_row_does() -> None:
    unrolls = random_unrolls()
    output = random_output(unrolls)

    def value_loss(rows: Tensor) -> Tensor:
        return vtrace_loss(unrolls, output._replace(value=output.value + 5.0 * rows), CONFIG, entropy_cost=0.1).report[
            "value_loss"
        ]

    assert unrolls.terminated.any()
    assert unrolls.truncated.any()
    assert value_loss(unrolls.terminated) == value_loss(torch.zeros_like(unrolls.terminated))
    assert value_loss(unrolls.truncated) != value_loss(torch.zeros_like(unrolls.truncated))


def test_vtrace_loss_no_valid_transition_is_zero_with_zero_gradients() -> None:
    unrolls = random_unrolls()
    unrolls = unrolls._replace(terminated=torch.ones_like(unrolls.terminated))
    output = random_output(unrolls, requires_grad=True)
    parts = vtrace_loss(unrolls, output, CONFIG, entropy_cost=0.1)
    parts.total.backward()
    assert parts.total == 0
    assert {name for name, value in parts.report.items() if value} == {"entropy_cost"}
    assert not output.logits.grad.any()  # type: ignore[union-attr]
    assert not output.value.grad.any()  # type: ignore[union-attr]


def test_vtrace_loss_is_a_mean_over_valid_transitions() -> None:
    """Another unroll that is all ends adds nothing to the loss, and takes nothing away."""
    unrolls = random_unrolls(batch=2)
    output = random_output(unrolls)
    only_first = unrolls._replace(terminated=unrolls.terminated | torch.tensor([False, True]))
    first = unrolls.tree_map(lambda tensor: tensor[:, :1] if tensor.dim() > 1 else tensor[:1])
    one = vtrace_loss(first, ModelOutput(output.logits[:, :1], output.value[:, :1]), CONFIG, entropy_cost=0.1)
    two = vtrace_loss(only_first, output, CONFIG, entropy_cost=0.1)
    torch.testing.assert_close((two.total, two.report), (one.total, one.report))


def surrogate(logits: np.ndarray, value: np.ndarray, unrolls: Unrolls, targets: tuple[np.ndarray, ...]) -> float:
    """The loss by its definition in numpy, with targets that do not move."""
    vs, advantage = targets
    valid = ~(unrolls.terminated | unrolls.truncated).numpy()
    total, count = 0.0, 0
    for t in range(len(vs)):
        for b in range(vs.shape[1]):
            if valid[t, b]:
                policy = np.exp(logits[t, b]) / np.exp(logits[t, b]).sum()
                entropy = -(policy * np.log(policy)).sum()
                total += -advantage[t, b] * np.log(policy[unrolls.action[t, b]])
                total += 0.5 * 0.7 * (vs[t, b] - value[t, b]) ** 2 - 0.1 * entropy
                count += 1
    return total / count


def test_vtrace_loss_gradients_equal_finite_differences() -> None:
    config = one_step(discount=0.9, value_cost=0.7, trace_lambda=0.8)
    config.vtrace = VTraceConfig(rho_bar=1.2, c_bar=0.9, pg_rho_bar=1.4)
    unrolls = random_unrolls(length=3, batch=2)
    output = random_output(unrolls, requires_grad=True)
    vtrace_loss(unrolls, output, config, entropy_cost=0.1).total.backward()
    logits, value = (tensor.detach().numpy().copy() for tensor in (output.logits, output.value))

    def chosen(logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)[:-1].gather(-1, unrolls.action[:-1].unsqueeze(-1)).squeeze(-1)

    targets = vtrace(
        log_rho_t=chosen(output.logits.detach()) - chosen(unrolls.behavior_logits),
        reward_tp1=unrolls.inputs.reward[1:],
        discount_tp1=torch.where(unrolls.terminated[1:], 0.0, 0.9),
        value=output.value.detach(),
        valid_t=~(unrolls.terminated | unrolls.truncated)[:-1],
        rho_bar=1.2,
        c_bar=0.9,
        pg_rho_bar=1.4,
        trace_lambda=0.8,
    )
    frozen = tuple(tensor.numpy() for tensor in targets)
    for array, gradient in ((logits, output.logits.grad), (value, output.value.grad)):
        numeric = np.zeros_like(array)
        for index in np.ndindex(array.shape):
            for sign in (+1, -1):
                array[index] += sign * 1e-6
                numeric[index] += sign * surrogate(logits, value, unrolls, frozen) / 2e-6
                array[index] -= sign * 1e-6
        np.testing.assert_allclose(gradient, numeric, atol=1e-6)


def reached(unrolls: Unrolls, output: ModelOutput, **settings: Any) -> np.ndarray:
    """Return at which transitions [T, B] the policy has a gradient."""
    logits = output.logits.detach().requires_grad_()
    config = one_step(discount=0.9, value_cost=0.0, **settings)
    vtrace_loss(unrolls, output._replace(logits=logits), config, entropy_cost=0.0).total.backward()
    assert logits.grad is not None
    return logits.grad[:-1].abs().sum(dim=-1).numpy() > 0


def test_vtrace_loss_in_several_passes_has_no_gradient_for_actions_that_have_moved_far_enough() -> None:
    unrolls = random_unrolls(length=9, batch=6)
    output = random_output(unrolls)
    policies = (output.logits.softmax(-1), unrolls.behavior_logits.softmax(-1))
    new, old = (policy[:-1].gather(-1, unrolls.action[:-1].unsqueeze(-1)).squeeze(-1).numpy() for policy in policies)
    config = one_step(discount=0.9)
    _, advantage = vtrace(
        log_rho_t=torch.from_numpy(np.log(new / old)),
        reward_tp1=unrolls.inputs.reward[1:],
        discount_tp1=torch.where(unrolls.terminated[1:], 0.0, 0.9),
        value=output.value,
        valid_t=~(unrolls.terminated | unrolls.truncated)[:-1],
        rho_bar=1.0,
        c_bar=1.0,
        pg_rho_bar=1.0,
        trace_lambda=config.trace_lambda,
    )
    is_better, counts = advantage.numpy() > 0, advantage.numpy() != 0
    expected = counts & np.where(is_better, new <= 1.2 * old, old <= 1.2 * new)
    np.testing.assert_array_equal(reached(unrolls, output, passes=2), expected)
    assert 0 < expected.sum() < counts.sum()
    np.testing.assert_array_equal(reached(unrolls, output, passes=1), counts)
    np.testing.assert_array_equal(reached(unrolls, output, passes=2, vtrace=VTraceConfig(clip=0.0)), counts)


def test_vtrace_loss_total_weighs_its_parts() -> None:
    unrolls = random_unrolls()
    parts = vtrace_loss(unrolls, random_output(unrolls), one_step(value_cost=0.25), entropy_cost=0.03)
    report = parts.report
    torch.testing.assert_close(
        parts.total, report["policy_loss"] + 0.25 * report["value_loss"] - 0.03 * report["entropy"]
    )


def test_vtrace_loss_uniform_policy_has_the_entropy_of_its_actions() -> None:
    unrolls = random_unrolls(actions=5)
    output = ModelOutput(torch.full_like(unrolls.behavior_logits, 3.0), torch.zeros_like(unrolls.behavior_value))
    assert float(vtrace_loss(unrolls, output, CONFIG, 0.0).report["entropy"]) == pytest.approx(math.log(5))


def test_vtrace_loss_on_policy_has_no_divergence_and_clips_nothing() -> None:
    unrolls = random_unrolls()
    parts = vtrace_loss(unrolls, random_output(unrolls)._replace(logits=unrolls.behavior_logits), CONFIG, 0.0)
    assert float(parts.report["kl"]) == 0.0
    assert float(parts.report["clipped_rho"]) == 0.0


def test_vtrace_loss_policy_that_doubled_its_actions_reports_divergence_and_clipping() -> None:
    unrolls = random_unrolls(actions=3)
    unrolls = unrolls._replace(
        action=torch.zeros_like(unrolls.action),
        behavior_logits=torch.log(torch.tensor([0.25, 0.5, 0.25])).expand_as(unrolls.behavior_logits),
    )
    logits = torch.log(torch.tensor([0.5, 0.25, 0.25])).expand_as(unrolls.behavior_logits)
    parts = vtrace_loss(unrolls, random_output(unrolls)._replace(logits=logits), CONFIG, 0.0)
    assert float(parts.report["kl"]) == pytest.approx(1 - math.log(2)), "never negative"
    assert float(parts.report["clipped_rho"]) == pytest.approx(0.5), "half of a weight of 2"


@pytest.mark.parametrize(
    ("scale", "bound", "expected"),
    [
        (1.0, 0.0, [-3.0, 0.5, 40.0]),
        (0.1, 0.0, [-0.3, 0.05, 4.0]),
        (1.0, 1.0, [-1.0, 0.5, 1.0]),
        (0.1, 1.0, [-0.3, 0.05, 1.0]),  # scaled first
    ],
)
def test_shaped_reward_scales_then_clips(scale: float, bound: float, expected: list[float]) -> None:
    reward = torch.tensor([-3.0, 0.5, 40.0])
    shaped = shaped_reward(reward, AlgorithmConfig(reward_scale=scale, reward_clip=bound))
    torch.testing.assert_close(shaped, torch.tensor(expected))
    assert reward.tolist() == [-3.0, 0.5, 40.0]


def test_vtrace_loss_trains_on_the_shaped_reward() -> None:
    unrolls = random_unrolls()
    output = random_output(unrolls)
    config = one_step(reward_scale=2.0, reward_clip=0.5)
    shaped = unrolls._replace(inputs=unrolls.inputs._replace(reward=(2 * unrolls.inputs.reward).clamp(-0.5, 0.5)))
    assert_same_loss(vtrace_loss(unrolls, output, config, 0.0), vtrace_loss(shaped, output, one_step(), 0.0))
