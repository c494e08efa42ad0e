"""What algorithms report about a policy and a value, and when that is a bad sign."""

import math

import pytest
import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms.actor_critic import RewardBound, ValueTargets, actor_critic_signs, clipped_share, divergence
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.algorithms.signs import Sign
from seedrl.specs import ContinuousSpec, EnvSpec
from tests.fakes import TinyModel, make_spec

MODEL = nn.Linear(1, 1)


def evenly(values: Tensor) -> Tensor:
    return torch.full_like(values, 1 / values.numel())


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 100.0])
def test_divergence_is_never_negative_and_always_finite(scale: float) -> None:
    log_ratio = scale * torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    found = float(divergence(log_ratio, evenly(log_ratio)))
    assert 0 <= found < math.inf


def test_divergence_of_many_actions_is_that_of_the_policies() -> None:
    old, new = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    exact = float((old * (old / new).log()).sum())
    assert float(divergence((new / old).log(), weight=old)) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(("ratios", "expected"), [([1, 1], 0.0), ([0.5, 1], 0.0), ([1, 3], 0.5), ([9, 9], 8 / 9)])
def test_clipped_share_is_what_the_clip_cuts_off(ratios: list[float], expected: float) -> None:
    log_ratio = torch.tensor(ratios).log()
    assert float(clipped_share(log_ratio, 1.0, evenly(log_ratio))) == pytest.approx(expected, abs=1e-6)


def test_reward_bound_values_that_rewards_can_add_up_to_are_within_it() -> None:
    bound = RewardBound(0.99, MODEL)
    reward = torch.tensor([[0.0], [1.0]])
    assert float(bound.share(reward, torch.full_like(reward, 100.0), evenly(reward))) == pytest.approx(1.0, rel=1e-4)
    later = torch.zeros(2, 1)
    assert float(bound.share(later, torch.full_like(later, -500.0), evenly(later))) == pytest.approx(5.0, rel=1e-4), (
        "rewards that were seen once count, and values below zero as well"
    )


@pytest.mark.parametrize(("discount", "reward"), [(1.0, 1.0), (0.99, 0.0)])
def test_reward_bound_where_there_is_none_says_nothing(discount: float, reward: float) -> None:
    values = torch.full((2, 1), 1e9)
    assert float(RewardBound(discount, MODEL).share(torch.full_like(values, reward), values, evenly(values))) == 0.0


def test_reward_bound_leaves_out_rows_that_do_not_count() -> None:
    reward, target = torch.tensor([1.0, 50.0]), torch.tensor([10.0, 1e6])
    share = RewardBound(0.9, MODEL).share(reward, target, torch.tensor([1.0, 0.0]))
    assert float(share) == pytest.approx(1.0, rel=1e-4)


def test_value_targets_report_what_a_direct_computation_finds() -> None:
    reward, value, target = (torch.tensor(row).double() for row in ([1.0, 2.0, 9.0], [1.0, 4.0, 7.0], [2.0, 4.0, 7.0]))
    targets = ValueTargets(0.5, MODEL)
    targets.note(reward=reward, value=value, target=target, weight=torch.tensor([0.5, 0.5, 0.0]))
    expected = {
        "value_share": 3.0 / 4.0,  # a mean of 3; rewards of 2 add up to 4
        "explained_variance": 1 - 0.5 / 1.0,
        "target_mean": 3.0,
        "target_square": (4 + 16) / 2,
    }
    assert {name: number.item() for name, number in targets.report().items()} == pytest.approx(expected)
    assert targets.unit.item() == 1.0


def entropy_signs(spec: EnvSpec) -> dict[str, Sign]:
    config = AlgorithmConfig(entropy_cost=0.01)
    found = actor_critic_signs(config, Actions(spec), TinyModel(spec)).numbers
    return {sign.condition: sign for sign in found if sign.value == "entropy"}


def test_entropy_of_choices_is_bad_near_none_and_near_all_of_it() -> None:
    signs = entropy_signs(make_spec(num_actions=4))
    gone = [signs["entropy gone"].is_bad(share * math.log(4)) for share in (0.0, 0.01, 0.1, 1.0)]
    assert gone == [True, True, False, False]
    assert [signs["policy unmoved"].is_bad(share * math.log(4)) for share in (0.0, 0.9, 0.999)] == [False, False, True]


def test_entropy_of_gaussians_is_bad_where_they_are_narrow_and_never_too_wide() -> None:
    spec = EnvSpec(make_spec().observation, ContinuousSpec((-1.0,) * 3, (1.0,) * 3, (3,)))
    signs = entropy_signs(spec)

    def entropy(deviation: float) -> float:
        return 3 * (math.log(deviation) + 0.5 * math.log(2 * math.pi * math.e))

    assert [signs["entropy gone"].is_bad(entropy(each)) for each in (0.01, 0.05, 1.0)] == [True, False, False]
    assert not signs["policy unmoved"].is_bad(entropy(5.0))
