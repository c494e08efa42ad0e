"""Updates on a real store: what they change, what they count, and when they refuse."""

import math

import pytest
import torch

from seedrl.algorithms.base import Loss
from seedrl.algorithms.settings import Optimizer
from seedrl.config import ModelConfig, ServingConfig
from seedrl.learning.learner import PATIENCE, REPORT_EVERY
from seedrl.models.build import build_model
from tests.builders import LearnerParts, learner_parts, one_step, record, same, weights
from tests.fakes import TinyModel, make_spec
from tests.oracles import assert_continues_exactly

PER_BATCH = 2 * 3  # transitions of a train batch of the learners here


def served_weights(parts: LearnerParts) -> dict[str, torch.Tensor]:
    with parts.policy.read() as (model, _):
        return weights(model)


def test_learner_update_with_a_train_batch_trains_and_counts() -> None:
    parts = learner_parts()
    before = weights(parts.learner.model)
    parts.record()
    assert parts.update()
    assert not same(weights(parts.learner.model), before)
    assert parts.metrics.updates == 1
    assert parts.metrics.trained_steps == PER_BATCH
    assert parts.metrics.skipped_updates == 0
    assert parts.metrics.learner_seconds["backward"] > 0


def test_learner_update_without_a_train_batch_returns_false_and_changes_nothing() -> None:
    parts = learner_parts()
    record(parts.store, parts.learner.model, parts.spec, unrolls=1)  # one short of a train batch
    before = weights(parts.learner.model)
    assert not parts.update()
    assert same(weights(parts.learner.model), before)
    assert parts.metrics.updates == parts.metrics.trained_steps == 0
    assert parts.store.ready == 1


def test_learner_updates_take_one_train_batch_each() -> None:
    parts = learner_parts()
    parts.record(batches=3)
    assert [parts.update() for _ in range(4)] == [True, True, True, False]
    assert parts.metrics.updates == 3
    assert parts.metrics.trained_steps == 3 * PER_BATCH
    assert parts.store.ready == 0


@pytest.mark.parametrize("optimizer", list(Optimizer))
def test_learner_repeated_updates_lower_the_value_loss(optimizer: Optimizer) -> None:
    parts = learner_parts(one_step(optimizer=optimizer, learning_rate=0.01, discount=0.0, value_cost=1.0))
    losses = []
    for _ in range(3 * REPORT_EVERY):
        parts.record()
        parts.update()
        losses.append(parts.metrics.algorithm["value_loss"])
    assert losses[-1] < 0.8 * losses[0]


def test_learner_publish_serves_the_trained_weights_under_the_number_of_updates() -> None:
    parts = learner_parts()
    before = served_weights(parts)
    parts.record(batches=2)
    parts.update()
    parts.update()
    assert same(served_weights(parts), before)
    assert parts.policy.version == 0
    parts.learner.publish(parts.policy)
    assert same(served_weights(parts), weights(parts.learner.model))
    assert parts.policy.version == 2


def test_learner_policy_lag_is_the_updates_since_the_weights_that_acted() -> None:
    parts = learner_parts()
    parts.metrics.updates = 5
    parts.record(policy_version=3)
    parts.record(policy_version=6)
    parts.update()  # 5 updates, acted by 3
    parts.update()  # 6 updates, acted by 6
    assert parts.metrics.policy_lag.mean == 1.0  # mean of 2 and 0


def test_learner_policy_lag_of_a_mixed_train_batch_is_the_mean() -> None:
    parts = learner_parts()
    parts.metrics.updates = 5
    for version in (1, 4):
        record(parts.store, parts.learner.model, parts.spec, unrolls=1, policy_version=version)
    parts.update()
    assert parts.metrics.policy_lag.mean == 2.5


def test_learner_policy_lag_after_many_millions_of_updates_is_exact() -> None:
    parts = learner_parts()
    parts.metrics.updates = 2**24 + 3  # whole numbers beyond 2**24 do not all fit float32
    parts.record(policy_version=2**24 + 1)
    parts.update()
    assert parts.metrics.policy_lag.mean == 2.0


def test_learner_losses_are_reported_with_the_gradient_norm() -> None:
    parts = learner_parts()
    parts.record()
    parts.update()
    metrics = parts.metrics
    reported = metrics.algorithm
    assert all(math.isfinite(reported[name]) and reported[name] for name in ("loss", "policy_loss", "value_loss"))
    assert reported["entropy"] > 0
    assert 0 <= reported["clipped_rho"] <= 1
    assert metrics.grad_norm > 0


@pytest.mark.parametrize("optimizer", list(Optimizer))
def test_learner_gradient_that_is_not_finite_is_skipped_and_counted(optimizer: Optimizer) -> None:
    parts = learner_parts(one_step(optimizer=optimizer))
    before = weights(parts.learner.model)
    record(parts.store, parts.learner.model, parts.spec, unrolls=2, reward=lambda reward: reward * math.nan)
    assert parts.update()
    assert same(weights(parts.learner.model), before)
    assert not parts.learner._optimizer.state
    assert (parts.metrics.skipped_updates, parts.metrics.updates) == (1, 1)


def test_learner_after_a_skipped_update_trains_as_if_it_had_not_been() -> None:
    disturbed, quiet = learner_parts(), learner_parts()
    record(disturbed.store, disturbed.learner.model, disturbed.spec, unrolls=2, reward=lambda reward: reward * math.nan)
    disturbed.update()
    for parts in (disturbed, quiet):
        parts.record()
        parts.update()
    assert same(weights(disturbed.learner.model), weights(quiet.learner.model))
    assert disturbed.metrics.skipped_updates == 1


@pytest.mark.parametrize("has_statistics", [False, True])
@pytest.mark.parametrize("algorithm", ["vtrace", "ppo"])
def test_learner_numbers_as_large_as_serving_admits_skip_no_update(has_statistics: bool, algorithm: str) -> None:
    """So a session that sends nothing else cannot end a run."""
    largest, spec = ServingConfig().max_observation, make_spec((64,))
    model = build_model(ModelConfig(name="mlp", normalize=has_statistics, popart=has_statistics), spec, seed=1)
    parts = learner_parts(one_step(name=algorithm), model, spec)
    for seed in range(2 * PATIENCE):
        record(
            parts.store,
            model,
            spec,
            unrolls=2,
            seed=seed,
            reward=lambda reward: reward.sign() * ServingConfig().max_reward,
            observation=lambda observation: observation.sign() * largest,
        )
        assert parts.update()
    assert parts.metrics.skipped_updates == 0
    assert all(value.isfinite().all() for value in weights(parts.learner.model).values())


def disturb(parts: LearnerParts, updates: int) -> None:
    """Updates whose gradients are not finite."""
    for _ in range(updates):
        record(parts.store, parts.learner.model, parts.spec, unrolls=2, reward=lambda reward: reward * math.nan)
        parts.update()


def test_learner_has_diverged_after_ten_skipped_updates_in_a_row() -> None:
    """B3."""
    parts = learner_parts()
    before = weights(parts.learner.model)
    disturb(parts, PATIENCE - 1)
    assert not parts.learner.has_diverged
    disturb(parts, 1)
    assert parts.learner.has_diverged
    assert PATIENCE == parts.metrics.skipped_updates == 10
    assert same(weights(parts.learner.model), before)


def test_learner_has_not_diverged_while_some_updates_are_finite() -> None:
    parts = learner_parts()
    for _ in range(3):
        disturb(parts, PATIENCE - 1)
        parts.record()
        parts.update()
        assert parts.learner.skipped_in_a_row == 0
    assert not parts.learner.has_diverged


def test_learner_loss_that_is_infinite_is_skipped_although_its_gradient_is_finite() -> None:
    parts = learner_parts()
    before = weights(parts.learner.model)
    parts.record()
    parts.update()  # gives parameters a gradient
    changed = weights(parts.learner.model)
    infinite = Loss(torch.tensor(math.inf), {})
    parts.learner._step_if_finite(infinite, torch.tensor(1.0))
    assert same(weights(parts.learner.model), changed)
    assert not same(changed, before)
    assert parts.metrics.skipped_updates == 1


@pytest.mark.parametrize(("steps", "expected"), [(0, 0.1), (250, 0.08), (1000, 0.02), (1500, 0.02)])
def test_learner_learning_rate_follows_the_env_steps(steps: int, expected: float) -> None:
    parts = learner_parts(one_step(learning_rate=0.1, learning_rate_end=0.02), stop_at=1000)
    parts.steps = steps
    parts.record()
    parts.update()
    assert parts.learner._optimizer.param_groups[0]["lr"] == pytest.approx(expected)


@pytest.mark.parametrize(("steps", "expected"), [(0, 0.5), (500, 0.3), (1000, 0.1)])
def test_learner_entropy_cost_follows_the_env_steps(steps: int, expected: float) -> None:
    parts = learner_parts(one_step(entropy_cost=0.5, entropy_cost_end=0.1, value_cost=0.5), stop_at=1000)
    parts.steps = steps
    parts.record()
    parts.update()
    reported = parts.metrics.algorithm
    weighed = reported["policy_loss"] + 0.5 * reported["value_loss"] - reported["loss"]
    assert weighed / reported["entropy"] == pytest.approx(expected, rel=1e-4)
    assert reported["entropy_cost"] == pytest.approx(expected)


def test_learner_gradients_are_clipped_before_the_step() -> None:
    """An epsilon far above the gradients makes a step of RMSprop the gradient itself."""
    steps = {}
    for max_norm in (0.0, 1e-3):
        algorithm = one_step(optimizer=Optimizer.rmsprop, epsilon=1e3, learning_rate=1e3, max_grad_norm=max_norm)
        parts = learner_parts(algorithm)
        before = weights(parts.learner.model)
        parts.record()
        parts.update()
        moved = [after - before[name] for name, after in weights(parts.learner.model).items()]
        steps[max_norm] = float(torch.cat([change.flatten() for change in moved]).norm())
    assert steps[1e-3] == pytest.approx(1e-3, rel=0.01)
    assert steps[0.0] > 0.1


def test_learner_model_with_memory_starts_from_the_recorded_core_state() -> None:
    """Invariant 3: the recorded unroll, run again from its core_state, gives the recorded logits and values."""
    spec = make_spec()
    torch.manual_seed(0)
    parts = learner_parts(model=TinyModel(spec, core_size=4), spec=spec)
    parts.record()
    unrolls = parts.store.take(2, timeout=0)
    assert unrolls is not None
    assert unrolls.core_state.any()
    output, _ = parts.learner.model(unrolls.inputs, unrolls.core_state)
    torch.testing.assert_close(output.logits, unrolls.behavior_logits)
    torch.testing.assert_close(output.value, unrolls.behavior_value)
    elsewhere, _ = parts.learner.model(unrolls.inputs, torch.zeros_like(unrolls.core_state))
    assert not torch.allclose(elsewhere.value, unrolls.behavior_value)


def test_learner_trains_a_model_with_memory_from_its_core_state() -> None:
    """The weights that acted are the weights that are trained, so their policies differ only if their memories do."""
    spec = make_spec()
    parts = learner_parts(model=TinyModel(spec, core_size=4), spec=spec)
    before = weights(parts.learner.model)
    parts.record()
    assert parts.update()
    after = weights(parts.learner.model)
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    assert parts.metrics.algorithm["kl"] == pytest.approx(0.0, abs=1e-6)


def test_learner_passes_over_a_train_batch_are_one_update_and_its_steps_count_once() -> None:
    parts = learner_parts(one_step(passes=3))
    parts.record()
    before = weights(parts.learner.model)
    assert parts.update()
    assert parts.metrics.updates == 1
    assert parts.metrics.gradient_steps == 3
    assert parts.metrics.unrolls_trained == 2
    assert parts.metrics.unroll_uses == 6
    assert parts.metrics.trained_steps == 6
    assert not same(weights(parts.learner.model), before)
    assert parts.store.ready == 0


def with_critic() -> LearnerParts:
    spec = make_spec((5,))
    return learner_parts(one_step(name="tests.ranked:WithCritic"), TinyModel(spec), spec)


def test_learner_trains_the_networks_of_an_algorithm_and_never_publishes_them() -> None:
    parts = with_critic()
    parts.record()
    before = weights(parts.learner._networks)
    assert parts.update()
    parts.learner.publish(parts.policy)
    after = weights(parts.learner._networks)
    assert [name for name in before if torch.equal(before[name], after[name])] == []  # statistics included
    with parts.policy.read() as (served, _):
        assert weights(served).keys() == weights(parts.learner.model).keys()


def test_learner_skips_a_step_of_the_model_and_the_networks_together() -> None:
    parts = with_critic()
    record(parts.store, parts.learner.model, parts.spec, 2, reward=lambda reward: reward * math.inf)
    before = weights(parts.learner._trained)
    assert parts.update()
    assert parts.metrics.skipped_updates == 1
    assert same(before, weights(parts.learner._trained))


def test_learner_with_networks_continues_exactly_from_its_tensors() -> None:
    assert_continues_exactly(with_critic(), with_critic())
