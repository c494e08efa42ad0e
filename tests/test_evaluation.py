"""Evaluation slots: greedy, counted apart, and never trained on, in the same batches as all others."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from seedrl.config import ActorsConfig, LearnerConfig
from seedrl.errors import ConfigError
from seedrl.serving.seats import EVALUATION, Seat, planned_seats
from seedrl.serving.sessions import SessionTable
from seedrl.sizes import evaluation_envs
from seedrl.specs import ContinuousSpec, EnvSpec
from seedrl.types import ModelInput, ModelOutput, Unrolls
from seedrl.validation import check
from seedrl.wire.messages import Hello
from tests.chaos.counting import ENV, STEP, CountingPool
from tests.chaos.model import CountingModel, UnrollCheck
from tests.fakes import FakePool, make_job, make_spec
from tests.rig import Rig, make_model, stacked


class Undecided(nn.Module):
    """Prefers action 2 a little, always; its numbers are the same for amounts and choices."""

    core_size = 0

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.linspace(0.0, 1.0, spec.policy_size))

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        rows = inputs.reward.shape
        return ModelOutput(self.numbers.expand(*rows, -1), inputs.reward), core_state


def alternating(count: int, evaluation: Seat = EVALUATION) -> list[Seat]:
    return [evaluation if number % 2 == 1 else Seat() for number in range(count)]


def take_all(rig: Rig) -> Unrolls:
    unrolls = rig.store.take(rig.store.ready, timeout=0)
    assert unrolls is not None
    return unrolls


# Which environments.


@pytest.mark.parametrize(("share", "envs", "count"), [(0.0, 32, 0), (0.25, 32, 8), (0.01, 32, 1), (0.5, 2, 1)])
def test_evaluation_envs_are_the_share_of_an_actor_and_at_least_one(share: float, envs: int, count: int) -> None:
    chosen = evaluation_envs(LearnerConfig(actors=ActorsConfig(envs=envs, evaluation=share)))
    assert len(set(chosen)) == len(chosen) == count
    assert all(0 <= env < envs for env in chosen)


@given(st.integers(2, 300), st.floats(0.0, 0.9))
@settings(deadline=None)
def test_evaluation_envs_are_spread_over_the_actor(envs: int, share: float) -> None:
    chosen = evaluation_envs(LearnerConfig(actors=ActorsConfig(envs=envs, evaluation=share)))
    gaps = np.diff([*chosen, envs]) if chosen else np.zeros(0)
    assert all(gaps >= 1)
    assert gaps.max(initial=0) - gaps.min(initial=envs) <= 1


@pytest.mark.parametrize(("share", "envs"), [(1.0, 8), (-0.1, 8), (0.5, 1), (0.99, 8)])
def test_check_share_that_leaves_nothing_to_train_on_is_refused(share: float, envs: int) -> None:
    config = LearnerConfig(actors=ActorsConfig(envs=envs, evaluation=share, groups=1))
    with pytest.raises(ConfigError, match=r"actors\.evaluation"):
        check(config)


def test_join_sessions_are_told_apart_by_environment() -> None:
    config = LearnerConfig(actors=ActorsConfig(envs=8, evaluation=0.25))
    table = SessionTable(config, lambda _: 1, planned_seats(config))
    session, _ = table.join(Hello("a"))
    seats = table.seats
    assert (~seats.is_trained[session.lease.slots]).tolist() == [True, False, False, False, True, False, False, False]
    assert seats.temperature[session.lease.slots].tolist() == [0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    config.actors.evaluation = 0.0
    assert planned_seats(config) == [Seat(exponent=1.0)] * 8


# What they do.


def test_run_evaluation_rows_take_the_likeliest_choice_while_others_sample() -> None:
    spec = make_spec(num_actions=3)
    rig = Rig(spec, Undecided(spec), slots=8, unroll_length=50)
    pool = FakePool(make_job(8))
    session, actions = rig.join(range(8), alternating(8)), []
    for _ in range(100):
        rows = pool.recv()
        (action,) = rig.run(rig.request(session, rows))
        pool.send(action, rows.env_id)
        actions.append(action)
    chosen = np.stack(actions)
    assert (chosen[:, 1::2] == 2).all()
    sampled = np.bincount(chosen[:, ::2].reshape(-1), minlength=3) / chosen[:, ::2].size
    np.testing.assert_allclose(sampled, torch.softmax(torch.tensor([0.0, 0.5, 1.0]), 0).numpy(), atol=0.08)


def test_run_evaluation_rows_take_the_mean_of_amounts_while_others_draw() -> None:
    spec = EnvSpec(make_spec().observation, ContinuousSpec((-9.0,) * 2, (9.0,) * 2, (2,)))
    rig = Rig(spec, Undecided(spec), slots=4, unroll_length=4)
    rows = FakePool(make_job(4)).recv()
    (action,) = rig.run(rig.request(rig.join(range(4), alternating(4)), rows))
    np.testing.assert_allclose(action[1::2], [[0.0, 3.0], [0.0, 3.0]], atol=1e-5)  # a third is a third of the bound
    assert (np.abs(action[::2] - [0.0, 3.0]) > 1e-3).all()


def test_run_evaluation_that_is_not_greedy_samples() -> None:
    spec = make_spec(num_actions=3)
    rig = Rig(spec, Undecided(spec), slots=64)
    (action,) = rig.run(rig.request(rig.join(range(64), [Seat(is_trained=False)] * 64), FakePool(make_job(64)).recv()))
    assert len(np.unique(action)) == 3


# What is trained on.


@pytest.mark.parametrize("group_size", [4, 2])
def test_run_no_evaluation_row_reaches_a_train_batch_and_no_other_row_is_missing(
    group_size: int, tmp_path: Any
) -> None:
    """Counting environments sign every row; 301 rows of each."""
    pool = CountingPool(make_job(8, group_size, env_id="counting"))
    model = CountingModel(pool.spec, violations=str(tmp_path / "violations"))
    rig = Rig(pool.spec, model, slots=8, capacity=16, unroll_length=4)
    session, oracle = rig.join([5, 3, 1, 7, 0, 2, 4, 6], alternating(8)), UnrollCheck()
    trained: list[np.ndarray] = []
    for _ in range(301 * 8 // group_size):
        rig.play(session, pool, steps=1)
        if rig.store.ready:
            unrolls = take_all(rig)
            assert oracle.violations(unrolls.inputs) == []
            trained.append(unrolls.inputs.observation.numpy()[:-1].reshape(-1, pool.spec.observation.shape[0]))
    rows = np.concatenate(trained)
    assert set(rows[:, ENV].tolist()) == {0, 2, 4, 6}
    for env in (0, 2, 4, 6):
        assert sorted(rows[rows[:, ENV] == env, STEP].tolist()) == list(range(300))
    assert rig.metrics.unrolls_made == 4 * 75
    assert rig.metrics.rows == 8 * 301


@pytest.mark.parametrize("unroll_length", [1, 2, 5])
def test_run_evaluation_sees_the_frames_and_remembers_the_core_state_of_a_slot_that_is_trained_on(
    unroll_length: int,
) -> None:
    """The policy gets the same inputs in a slot for evaluation as in one for training, across unrolls and resets."""
    pool = FakePool(make_job(1), episode_length=7)
    model = make_model(stacked(pool.spec, 3), core_size=2)
    rig = Rig(pool.spec, model, slots=2, unroll_length=unroll_length, frame_stack=3)
    session = rig.join([0, 1], [Seat(), EVALUATION])
    outputs: list[Tensor] = []
    with rig.policy.read() as (current, _):
        current.register_forward_hook(
            lambda _, __, output: outputs.append(torch.cat([output[0].logits[0], output[1]], 1))
        )
    for _ in range(60):
        rows = pool.recv()
        twice = rows._replace(
            env_id=np.array([0, 1], np.int32),
            observation=np.repeat(rows.observation, 2, axis=0),
            reward=np.repeat(rows.reward, 2),
            flags=np.repeat(rows.flags, 2),
        )
        rig.run(rig.request(session, twice))
        if rig.store.ready:
            take_all(rig)
        pool.send(np.zeros(1, np.int32), rows.env_id)
    for output in outputs:
        torch.testing.assert_close(output[0], output[1], rtol=0, atol=0)
    assert torch.stack(outputs).std() > 0.01


def test_run_evaluation_never_waits_for_room_in_the_store() -> None:
    rig = Rig(make_spec(), slots=2, capacity=0, unroll_length=2)
    pool = FakePool(make_job(2))
    rig.play(rig.join([0, 1], [EVALUATION] * 2), pool, steps=50)  # asserts that no unroll waits
    assert rig.selector.added == 0


def test_claim_slots_change_between_evaluation_and_training_with_their_sessions() -> None:
    rig = Rig(make_spec(), slots=2, unroll_length=4)
    first = rig.join([0, 1], [EVALUATION, Seat()])
    rig.play(first, FakePool(make_job(2)), steps=3)
    rig.inference.release(first)
    assert rig.metrics.rows_dropped["partial_unroll"] == 3  # evaluation had nothing to lose
    assert rig.metrics.unrolls_dropped["session_ended"] == 1
    rig.play(rig.join([0, 1], [Seat(), EVALUATION]), FakePool(make_job(2)), steps=9)
    assert take_all(rig).inputs.observation[..., 0].unique().tolist() == [0.0]


# What is counted.


def play_mixed(rig: Rig, seats: Sequence[Seat]) -> None:
    """Eight episodes of five steps in each of four environments, but for the last step of the last one."""
    rig.play(rig.join(range(4), seats), FakePool(make_job(4), episode_length=5), steps=8 * 6 - 1)


def test_run_evaluation_is_counted_apart() -> None:
    rig = Rig(make_spec(), slots=4)
    play_mixed(rig, [EVALUATION, *[Seat()] * 3])
    metrics = rig.metrics
    assert (metrics.env_steps, metrics.eval_steps) == (3 * 39, 39)
    assert (metrics.episodes, metrics.eval_episodes) == (3 * 7, 7)
    assert (metrics.episode_return.count, metrics.eval_return.count, metrics.eval_length.count) == (21, 7, 7)
    assert (len(metrics.returns), list(metrics.eval_returns)) == (21, [5.0] * 7)
    assert metrics.eval_return_mean_100 == 5.0
    assert metrics.rows == 4 * 47
    assert [episodes.slots.tolist() for episodes in rig.evaluated] == [[0]] * 7


def test_run_without_evaluation_counts_none() -> None:
    rig = Rig(make_spec(), slots=4)
    play_mixed(rig, [Seat()] * 4)
    metrics = rig.metrics
    assert (metrics.env_steps, metrics.eval_steps, metrics.eval_episodes) == (4 * 39, 0, 0)
    assert metrics.eval_return_mean_100 is None
