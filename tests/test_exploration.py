"""Exploration by settings: what each slot draws from, over a run, and what is recorded and shown of it."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from seedrl.config import ActorsConfig, ExplorationConfig, LearnerConfig
from seedrl.errors import ConfigError
from seedrl.metrics import LearningMetrics, ServingMetrics
from seedrl.monitoring.overview import exploration_words
from seedrl.monitoring.sampler import Sampler
from seedrl.serving.seats import EVALUATION, Exploration, Schedule, Seat, Seats, final_exploration, planned_seats
from seedrl.serving.sessions import SessionTable
from seedrl.validation import check
from seedrl.wire.messages import ControlRequest, Hello
from tests.fakes import FakePool, make_job, make_spec
from tests.rig import Rig, make_rows
from tests.test_inference import Telling, replay_at_once

CHI_SQUARE_999 = 13.82  # what chance exceeds once in a thousand, with two degrees of freedom


def settings(envs: int = 4, evaluation: float = 0.0, **exploration: Any) -> LearnerConfig:
    return LearnerConfig(
        actors=ActorsConfig(envs=envs, groups=1, evaluation=evaluation), exploration=ExplorationConfig(**exploration)
    )


def make_rig(config: LearnerConfig, **options: Any) -> Rig:
    return Rig(make_spec(), slots=config.actors.envs, schedule=Schedule.of(config.exploration), **options)


def epsilons(seats: Seats) -> list[float]:
    """Return those of all slots but the spare one."""
    return [round(float(value), 6) for value in seats.epsilon[:-1]]


# The plan.


def test_planned_seats_by_default_draw_from_the_policy_itself() -> None:
    seats = Seats(4)
    seats.assign(np.arange(4), planned_seats(settings()))
    assert not seats.any_explores
    assert not seats.any_greedy
    assert not seats.is_moving


def test_planned_seats_ladder_is_that_of_ape_x_over_what_is_trained_on() -> None:
    config = settings(envs=6, evaluation=0.3, epsilon=0.4, ladder=7.0)  # two of six evaluate: 0 and 3
    seats = planned_seats(config)
    assert [env for env, seat in enumerate(seats) if seat == EVALUATION] == [0, 3]
    expected = [0.4 ** (1 + 7 * i / 3) for i in range(4)]
    trained = [seat.exploration.epsilon for seat in seats if seat.is_trained]
    np.testing.assert_allclose(trained, expected)


def test_planned_seats_ladder_of_one_environment_has_the_first_rung() -> None:
    (seat,) = planned_seats(settings(envs=1, epsilon=0.4, ladder=7.0))
    assert seat.exploration.epsilon == 0.4


def test_final_exploration_is_that_of_the_end_of_the_schedule() -> None:
    config = ExplorationConfig(temperature=0.0, epsilon=1.0, epsilon_end=0.05)
    assert final_exploration(config) == Exploration(0.0, 0.05)
    assert final_exploration(ExplorationConfig()) == Exploration()


# What is drawn.


def draws(rig: Rig, plan: list[Seat], batches: int) -> NDArray[np.int64]:
    """Return the actions [batches, envs] of a policy that is certain of action 1."""
    session, rows = rig.join(range(len(plan)), plan), make_rows(np.ones((len(plan), 2), np.float32))
    return np.stack([rig.run(rig.request(session, rows))[0] for _ in range(batches)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_run_ladder_slots_draw_at_random_as_often_as_their_epsilon_says(temperature: float) -> None:
    config = settings(envs=4, temperature=temperature, epsilon=0.5, ladder=3.0)
    rig = make_rig(config, model=Telling(num_actions=3), capacity=4096)
    plan = planned_seats(config)
    batches = 2000
    actions = draws(rig, plan, batches)
    for slot, seat in enumerate(plan):
        epsilon = seat.exploration.epsilon
        expected = batches * (epsilon / 3 + np.array([0, 1 - epsilon, 0]))
        found = np.bincount(actions[:, slot], minlength=3)
        assert ((found - expected) ** 2 / expected).sum() < CHI_SQUARE_999


def test_run_schedule_moves_every_slot_as_far_as_its_rung() -> None:
    config = settings(envs=2, temperature=0.0, epsilon=1.0, epsilon_end=0.25, decay=0.5, ladder=1.0)
    rig = make_rig(config, model=Telling(num_actions=3))
    session, rows = rig.join([0, 1], planned_seats(config)), make_rows(np.ones((2, 2), np.float32))
    found = []
    for rig.fraction in (0.0, 0.1, 0.25, 0.5, 0.9, 1.5):
        rig.run(rig.request(session, rows))
        found.append(epsilons(rig.seats))
    base = [1.0, 0.85, 0.625, 0.25, 0.25, 0.25]
    assert found == [[epsilon, round(epsilon**2, 6)] for epsilon in base]


def test_follow_changes_at_a_thousand_points_only() -> None:
    seats = Seats(1, Schedule(1.0, 0.0, 1.0))
    seats.assign(np.arange(1), planned_seats(settings(envs=1, epsilon=1.0, epsilon_end=0.0)))
    seats.follow(0.5)
    column = seats.explores
    seats.follow(0.5009)
    assert seats.explores is column  # nothing was computed
    assert epsilons(seats) == [0.5]
    seats.follow(0.5011)
    assert epsilons(seats) == [0.499]


def test_assign_after_the_schedule_has_moved_gives_new_slots_the_present_epsilon() -> None:
    config = settings(envs=2, epsilon=1.0, epsilon_end=0.0, decay=1.0)
    seats = Seats(4, Schedule.of(config.exploration))
    seats.follow(0.75)
    seats.assign(np.array([2, 3]), planned_seats(config))
    assert epsilons(seats) == [0.0, 0.0, 0.25, 0.25]


# What is recorded.


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_run_epsilon_greedy_records_the_logs_of_the_true_probabilities(epsilon: float) -> None:
    pool = FakePool(make_job(2))
    config = settings(envs=2, temperature=0.0, epsilon=epsilon, epsilon_end=epsilon)
    rig = Rig(pool.spec, slots=2, unroll_length=4, schedule=Schedule.of(config.exploration))
    rig.play(rig.join([0, 1], planned_seats(config)), pool, steps=5)
    unrolls = rig.store.take(2, timeout=0)
    assert unrolls is not None
    policy = replay_at_once(unrolls, rig.model).logits
    actions = policy.shape[-1]
    best = torch.nn.functional.one_hot(policy.argmax(-1), actions).float()
    expected = (1 - epsilon) * best + epsilon / actions
    torch.testing.assert_close(unrolls.behavior_logits.exp(), expected)
    torch.testing.assert_close(unrolls.behavior_logits.softmax(-1), expected)
    assert unrolls.behavior_logits.isfinite().all()
    if epsilon == 0.0:
        assert torch.equal(unrolls.action, policy.argmax(-1))


def test_run_evaluation_beside_epsilon_greedy_slots_stays_greedy() -> None:
    config = settings(envs=4, evaluation=0.5, temperature=0.0, epsilon=1.0)
    rig = make_rig(config, model=Telling(num_actions=3), capacity=512)
    actions = draws(rig, planned_seats(config), 200)
    assert (actions[:, [0, 2]] == 1).all()
    assert (actions[:, [1, 3]] != 1).mean() > 0.5


# Control.


def joined(config: LearnerConfig) -> SessionTable:
    table = SessionTable(config, lambda _: 1, planned_seats(config))
    table.join(Hello("a"))
    table.join(Hello("b"))
    return table


def test_obey_epsilon_of_one_actor_wins_over_the_schedule_and_others_follow_it() -> None:
    table = joined(settings(envs=2, temperature=0.0, epsilon=1.0, epsilon_end=0.0, decay=1.0))
    table.obey(ControlRequest(actor="a", epsilon=0.75))
    table.seats.follow(0.5)
    assert epsilons(table.seats)[:4] == [0.75, 0.75, 0.5, 0.5]
    assert table.exploration == (Exploration(0.0, 0.5), Exploration(0.0, 0.75))


def test_obey_temperature_alone_leaves_epsilon_to_the_schedule() -> None:
    table = joined(settings(envs=2, temperature=0.0, epsilon=1.0, epsilon_end=0.0, decay=1.0))
    table.obey(ControlRequest(temperature=2.0))
    table.seats.follow(0.5)
    table.join(Hello("c"))
    assert epsilons(table.seats)[:6] == [0.5] * 6
    assert table.seats.temperature[:6].tolist() == [2.0] * 6


def test_obey_epsilon_of_all_is_that_of_actors_to_come_and_evaluation_stays_greedy() -> None:
    table = joined(settings(envs=2, evaluation=0.5, epsilon=1.0, epsilon_end=0.0))
    table.obey(ControlRequest(epsilon=0.125))
    table.join(Hello("c"))
    table.seats.follow(0.3)
    assert epsilons(table.seats)[:6] == [0.0, 0.125] * 3
    assert table.seats.temperature[:6].tolist() == [0.0, 1.0] * 3


def test_obey_epsilon_once_the_schedule_has_reached_zero_explores_again() -> None:
    table = joined(settings(envs=1, temperature=0.0, epsilon=1.0, epsilon_end=0.0))
    table.seats.follow(1.0)
    table.obey(ControlRequest(epsilon=0.5))
    assert epsilons(table.seats)[:2] == [0.5, 0.5]


# What is shown and refused.


def test_exploration_words_name_the_ladder_where_there_is_one() -> None:
    row = {"exploration/temperature": 0.0, "exploration/epsilon": 0.42, "exploration/epsilon_least": 0.42}
    assert exploration_words(row) == "exploration: temperature 0, epsilon 0.42"
    row["exploration/epsilon_least"] = 0.0007
    assert exploration_words(row) == "exploration: temperature 0, epsilon 0.42, ladder 0.42 … 0.0007"


def test_sampler_row_has_the_exploration_of_trained_slots_if_there_is_any() -> None:
    def row(config: LearnerConfig) -> dict[str, Any]:
        sampler = Sampler(config, ServingMetrics(), LearningMetrics(), joined(config))
        totals = sampler.totals()
        found = sampler.row(totals, totals)
        return {name: value for name, value in found.items() if name.startswith("exploration/")}

    assert row(settings(envs=4, evaluation=0.25)) == {}
    explored = row(settings(envs=4, evaluation=0.5, temperature=0.0, epsilon=0.5, ladder=1.0))
    assert explored == {
        "exploration/temperature": 0.0,
        "exploration/epsilon": 0.5,
        "exploration/epsilon_least": 0.25,
    }


@pytest.mark.parametrize(
    ("exploration", "words"),
    [
        ({"epsilon": 1.5}, "exploration.epsilon=1.5 must be between 0 and 1"),
        ({"epsilon_end": -0.1}, "exploration.epsilon_end=-0.1 must be between 0 and 1, or null"),
        ({"temperature": -1.0}, "exploration.temperature=-1.0 must be finite"),
        ({"temperature": float("nan")}, "exploration.temperature=nan must be finite"),
        ({"decay": 0.0}, "exploration.decay=0.0 must be above 0"),
        ({"ladder": -1.0}, "exploration.ladder=-1.0 must be finite"),
        ({"temperature": 0.0}, "nothing would explore; set exploration.epsilon"),
    ],
)
def test_check_exploration_that_cannot_work_is_refused(exploration: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(settings(**exploration))
