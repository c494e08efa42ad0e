"""The verdict on learning: each condition injected into rows, and the curves of real runs for false alarms."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from seedrl.actions import Actions
from seedrl.algorithms.build import BUILT_IN, build_algorithm
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.algorithms.signs import Sign, Signs, signs_of
from seedrl.config import LearnerConfig, ModelConfig, StopConfig
from seedrl.models.base import PopArt
from seedrl.models.build import build_model
from seedrl.monitoring.judgement import columns_for, judge
from seedrl.monitoring.trend import Course, rank_difference, rank_trend, trend_of
from seedrl.specs import ArraySpec, ContinuousSpec, EnvSpec
from seedrl.status import Learning, Mood
from tests.fakes import TinyModel, make_spec

BOX = ContinuousSpec((-1.0,), (1.0,), (1,))
STEPS, ROWS, EPISODE = 300_000, 120, 100  # of a run that takes ten minutes
RESULTS = Path(__file__).parents[1] / "bench/results/results.json"
Returns = Callable[[float], float]  # the mean return after a part of the run


def rows_of(returns: Returns, noise: float = 10.0, seed: int = 0, **columns: Any) -> list[dict[str, float]]:
    """Return the rows of a run, with columns that are numbers or functions of the part of the run that is over."""
    draw = np.random.default_rng(seed)
    rows, count, total = [], 0, 0.0
    for number in range(1, ROWS + 1):
        part = number / ROWS
        ended = STEPS // ROWS // EPISODE
        episodes = returns(part) + noise * draw.standard_normal(ended)
        count, total = count + ended, total + float(episodes.sum())
        rows.append(
            {
                "env_steps": int(STEPS * part),
                "seconds": 600 * part,
                "updates": int(150 * part) + 1,
                "skipped_updates": 0,
                "episodes": count,
                "returns": count,
                "return_sum": total,
                "return_mean_100": returns(part),
                "return_p10": returns(part) - noise,
                "return_p90": returns(part) + noise,
                "grad_norm": 1.0,
                **{f"{name}": value(part) if callable(value) else value for name, value in columns.items()},
            }
        )
    return rows


def reported(**values: Any) -> dict[str, Any]:
    return {f"algorithm/{name}": value for name, value in values.items()}


def flat(part: float) -> float:
    return 20.0


def up(part: float) -> float:
    return 20 + 400 * part


def rise_and_stay(part: float) -> float:
    return 20 + 480 * min(1.0, 5 * part)


def rise_and_fall(part: float) -> float:
    return 20 + 480 * (2.5 * part if part < 0.4 else max(0.1, 1 - 3 * (part - 0.4)))


def down(part: float) -> float:
    return -30 - 27 * part


def config_of(algorithm: str = "ppo", goal: float | None = None, **settings: Any) -> LearnerConfig:
    resolved = {"passes": 1, "minibatches": 1, "on_policy": False, "entropy_cost": 0.01}
    return LearnerConfig(
        algorithm=AlgorithmConfig(name=algorithm, **{**resolved, **settings}),
        stop=StopConfig(env_steps=STEPS, return_mean_100=goal),
    )


def signs_for(config: LearnerConfig, model: nn.Module | None = None) -> Signs:
    is_continuous = config.algorithm.name == "sac"
    spec = EnvSpec(ArraySpec((2,), "float32"), BOX) if is_continuous else make_spec(num_actions=2)
    network = build_model(ModelConfig(layers=[4]), spec, seed=1) if is_continuous else TinyModel(spec)
    return signs_of(build_algorithm(config.algorithm, Actions(spec, squash=True), model or network))


def verdict(rows: list[dict[str, float]], algorithm: str = "ppo", **settings: Any) -> Learning:
    config = config_of(algorithm, **settings)
    return judge(rows, config, signs_for(config))


# The return alone


@pytest.mark.parametrize(
    ("returns", "course"),
    [
        (flat, Course.flat),
        (up, Course.rising),
        (rise_and_stay, Course.settled),
        (rise_and_fall, Course.falling),
        (down, Course.falling),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_trend_is_seen_through_noise(returns: Returns, course: Course, seed: int) -> None:
    assert trend_of(rows_of(returns, seed=seed)).course is course


def test_trend_of_noise_alone_is_seldom_called_anything_but_flat() -> None:
    courses = [trend_of(rows_of(flat, noise=30.0, seed=seed)).course for seed in range(300)]
    assert courses.count(Course.flat) >= 0.93 * len(courses)


def test_trend_is_not_decided_by_one_extraordinary_episode() -> None:
    rows = rows_of(flat)
    for row in rows[-3:]:
        row["return_sum"] += 1e9
    assert trend_of(rows).course is Course.flat


def test_trend_scale_and_offset_of_returns_do_not_matter() -> None:
    for scale, offset in ((1e-6, 0.0), (1e6, -1e9)):
        rows = rows_of(lambda part, s=scale, o=offset: o + s * up(part), noise=10 * scale)  # type: ignore[misc]
        assert trend_of(rows).course is Course.rising


def test_trend_of_a_clear_rise_is_seen_in_few_blocks() -> None:
    values = [20, 25, 30, 45, 90, 150, 400, 500, 500]
    sums = np.cumsum([4.0 * value for value in values])
    rows = [
        {"env_steps": 1000.0 * number, "returns": 4.0 * number, "return_sum": total}
        for number, total in enumerate(sums, start=1)
    ]
    assert {trend_of(rows[:number]).course for number in (8, 9)} <= {Course.rising, Course.settled}


def test_trend_of_few_episodes_is_unknown() -> None:
    rows = rows_of(up)
    assert trend_of([]).course is Course.unknown
    assert trend_of([{**row, "returns": row["returns"] // 200, "return_sum": 0.0} for row in rows]).course is (
        Course.unknown
    )


def test_rank_statistics_have_the_deviation_of_chance() -> None:
    draw = np.random.default_rng(1)
    trends = [rank_trend(draw.standard_normal(12)) for _ in range(2000)]
    differences = [rank_difference(draw.standard_normal(6), draw.standard_normal(12)) for _ in range(2000)]
    for found in (trends, differences):
        assert np.std(found) == pytest.approx(1.0, abs=0.1)
        assert np.mean(np.array(found) > 2.33) < 0.015


# Verdicts


@pytest.mark.parametrize(
    ("returns", "expected", "mood"),
    [
        (up, "rising", Mood.good),
        (rise_and_stay, "settled", Mood.open),
        (flat, "flat", Mood.bad),
        (down, "falling", Mood.bad),
        (rise_and_fall, "falling", Mood.bad),
    ],
)
@pytest.mark.parametrize("algorithm", list(BUILT_IN))
def test_judge_names_the_course_of_the_return(algorithm: str, returns: Returns, expected: str, mood: Mood) -> None:
    found = verdict(rows_of(returns), algorithm)
    assert (found.verdict, found.mood) == (expected, mood)
    assert bool(found.change) == (mood is Mood.bad)


@pytest.mark.parametrize(
    ("algorithm", "setting"),
    [
        ("ppo", "algorithm.entropy_cost (now 0.01)"),
        ("vtrace", "algorithm.entropy_cost"),
        ("pqn", "exploration.eps"),
        ("dqn", "exploration.eps"),
    ],
)
def test_judge_flat_return_without_any_sign_advises_exploration(algorithm: str, setting: str) -> None:
    assert setting in verdict(rows_of(flat), algorithm).change


def test_judge_falling_return_advises_a_lower_learning_rate() -> None:
    assert verdict(rows_of(down)).change == "Lower algorithm.learning_rate (now 0.0003)."


@pytest.mark.parametrize(
    ("algorithm", "columns", "condition", "setting"),
    [
        ("ppo", reported(entropy=0.001), "entropy gone", "Raise algorithm.entropy_cost"),
        ("vtrace", reported(entropy=0.001), "entropy gone", "Raise algorithm.entropy_cost"),
        ("ppo", reported(entropy=0.6931), "policy unmoved", "Raise algorithm.learning_rate"),
        ("ppo", reported(clipped_ratio=0.8), "ratio clipped", "Lower algorithm.learning_rate"),
        ("ppo", reported(clipped_rho=0.5), "data too old", "Lower store.capacity"),
        ("vtrace", reported(clipped_rho=0.5), "data too old", "Lower store.capacity"),
        ("ppo", reported(explained_variance=-0.2), "values useless", "Raise algorithm.value_cost"),
        ("vtrace", reported(explained_variance=-0.2), "values useless", "Raise algorithm.value_cost"),
        ("pqn", reported(explained_variance=-0.2), "values useless", "Set model.layer_norm=true"),
        ("ppo", reported(value_share=50.0), "values exploding", "Set model.popart=true"),
        ("vtrace", reported(value_share=50.0), "values exploding", "Set model.popart=true"),
        ("pqn", reported(value_share=50.0), "values exploding", "Set model.layer_norm=true"),
        ("dqn", reported(value_share=50.0), "values exploding", "Raise algorithm.dqn.target_period (now 500)"),
        ("sac", reported(value_share=50.0), "values exploding", "Lower algorithm.learning_rate"),
        ("dqn", reported(explained_variance=-0.2), "values useless", "Lower algorithm.learning_rate"),
        ("pqn", {"grad_norm": 1e-9}, "gradient dead", "Lower algorithm.learning_rate"),
        ("ppo", {"grad_norm": 900.0}, "gradient cut", "Lower algorithm.reward_scale"),
        (
            "vtrace",
            {"skipped_updates": lambda part: int(40 * part)},
            "updates skipped",
            "Lower algorithm.learning_rate",
        ),
    ],
)
@pytest.mark.parametrize("returns", [flat, down])
def test_judge_injected_condition_is_named_with_one_setting(
    algorithm: str, columns: dict[str, Any], condition: str, setting: str, returns: Returns
) -> None:
    found = verdict(rows_of(returns, **columns), algorithm)
    assert (found.verdict, found.mood) == (condition, Mood.bad)
    assert found.change.startswith(setting)
    assert "{" not in found.evidence


def test_judge_exploding_values_with_popart_advise_a_lower_learning_rate() -> None:
    config = config_of()
    model = nn.ModuleList([TinyModel(make_spec(num_actions=2)), PopArt(nn.Linear(1, 1))])
    found = judge(rows_of(flat, **reported(value_share=9.0)), config, signs_for(config, model))
    assert found.change == "Lower algorithm.learning_rate (now 0.0003)."


def test_judge_bad_signs_of_a_run_that_learns_are_no_alarm() -> None:
    bad = reported(entropy=0.0, explained_variance=-9.0, clipped_ratio=0.9, clipped_rho=0.9)
    assert verdict(rows_of(up, **bad)).mood is Mood.good
    settled = verdict(rows_of(rise_and_stay, **bad))
    assert settled.mood is Mood.open
    assert settled.change == "For more: raise algorithm.entropy_cost (now 0.01)."


def test_judge_settled_return_is_not_advised_by_what_does_not_hold_it_back() -> None:
    bad = reported(explained_variance=-9.0, clipped_ratio=0.9)
    assert verdict(rows_of(rise_and_stay, **bad)).change == ""
    solved = rows_of(rise_and_stay, **reported(entropy=0.0), return_p10=500.0, return_p90=500.0)
    assert verdict(solved).change == "", "all episodes return the same"


def test_judge_solved_task_without_any_gradient_left_is_no_alarm() -> None:
    found = verdict(rows_of(rise_and_stay, noise=0.0, grad_norm=0.0, return_p10=500.0, return_p90=500.0))
    assert (found.verdict, found.mood, found.change) == ("settled", Mood.open, "")


def test_judge_few_bad_readings_are_no_sign() -> None:
    rows = rows_of(flat, **reported(entropy=lambda part: 0.0 if part > 0.95 else 0.5))
    assert verdict(rows).verdict == "flat"


def test_judge_few_rows_are_enough_if_all_of_them_are_bad_readings() -> None:
    rows = rows_of(flat, **reported(entropy=0.001))
    assert verdict(rows[::8]).verdict == "entropy gone"


def test_judge_few_skipped_updates_are_no_sign() -> None:
    assert verdict(rows_of(up, skipped_updates=lambda part: int(40 * part))).verdict == "rising"
    assert verdict(rows_of(flat, skipped_updates=lambda part: int(2 * part))).verdict == "flat"


def test_judge_goal_that_is_reached_is_good_however_flat_the_return_is() -> None:
    found = verdict(rows_of(flat, **reported(entropy=0.0)), goal=20.0)
    assert (found.verdict, found.mood) == ("reached", Mood.good)


def test_judge_newest_episodes_beyond_the_goal_are_good_before_the_mean_of_100_is() -> None:
    found = verdict(rows_of(rise_and_stay, return_mean_100=300.0), goal=475.0)
    assert (found.verdict, found.mood) == ("rising", Mood.good)
    assert "the mean of 100 follows" in found.evidence
    assert verdict(rows_of(rise_and_stay, return_mean_100=300.0), goal=600.0).verdict == "settled"


def test_judge_equal_returns_are_said_to_be_equal() -> None:
    found = verdict(rows_of(lambda part: -500.0, noise=0.0))
    assert "all of the last episodes returned -500" in found.evidence


@pytest.mark.parametrize("returns", [flat, down, rise_and_fall])
def test_judge_says_nothing_bad_within_the_first_minute(returns: Returns) -> None:
    hurried = {"seconds": lambda part: 59 * part, **reported(value_share=9.0), "grad_norm": 0.0}
    rows = rows_of(returns, **hurried)
    assert {verdict(rows[:number]).mood for number in range(1, ROWS)} <= {Mood.good, Mood.open}
    assert verdict(rows).mood is Mood.bad, "all steps are over"


def test_judge_settled_return_is_told_within_the_first_minute() -> None:
    assert verdict(rows_of(rise_and_stay, seconds=lambda part: 59 * part)[: ROWS - 1]).verdict == "settled"


def test_judge_says_nothing_bad_about_a_flat_return_before_a_third_of_the_run() -> None:
    rows = rows_of(flat)
    assert {verdict(rows[:number]).mood for number in range(1, ROWS // 3)} <= {Mood.good, Mood.open}
    assert verdict(rows[: ROWS // 3 + 1]).mood is Mood.bad


def test_judge_long_run_does_not_wait_for_a_third_of_its_steps() -> None:
    config = config_of()
    config.stop.env_steps = 10**9
    rows = [{**row, "env_steps": 10 * row["env_steps"]} for row in rows_of(flat)]
    assert judge(rows, config, Signs()).verdict == "flat"


def test_judge_before_updates_and_episodes_says_what_there_is() -> None:
    assert judge([], config_of(), Signs()).evidence == "There has been no update yet."
    row = {"env_steps": 10, "seconds": 1.0, "updates": 1, "skipped_updates": 0, "reward_per_step": 0.25}
    assert "the reward is 0.25 per step" in judge([row], config_of(), Signs()).evidence
    assert "1 episode has ended" in judge([{**row, "episodes": 1}], config_of(), Signs()).evidence


def test_judge_urgent_sign_does_not_wait_for_episodes() -> None:
    rows = [{**row, "returns": 0, "return_sum": 0.0, "episodes": 0} for row in rows_of(flat, grad_norm=0.0)]
    assert verdict(rows).verdict == "gradient dead"


def test_judge_takes_signs_of_an_algorithm_of_ones_own() -> None:
    sign = Sign("surprise", "too surprised", "it is surprised {value:g} times", "Lower algorithm.discount.", above=3.0)
    rows = rows_of(flat, **reported(surprise=4.0))
    found = judge(rows, config_of(), Signs((sign,)))
    assert (found.verdict, found.change) == ("too surprised", "Lower algorithm.discount.")
    assert "algorithm/surprise" in columns_for(Signs((sign,)))
    assert judge(rows, config_of(), signs_of(object())).verdict == "flat"


def test_judge_large_gradient_without_popart_advises_popart() -> None:
    config = config_of()
    config.model = ModelConfig(popart=False)
    assert judge(rows_of(flat, grad_norm=900.0), config, Signs()).change == "Set model.popart=true."


# The curves of real runs

STEPS_OF_AN_EPISODE: dict[str, Callable[[float], float]] = {
    **{task: lambda score: score for task in ("cartpole", "CartPole-v1", "InvertedPendulum-v4")},
    "Acrobot-v1": lambda score: -score,
    **{task: lambda _: 200.0 for task in ("Hopper-v4", "Walker2d-v4", "LunarLander-v3", "Pendulum-v1")},
    **{task: lambda _: 1000.0 for task in ("HalfCheetah-v4", "pong")},
}
A_FEW = 15.0  # steps of an episode of small tasks
BUDGETS = {"CartPole-v1": 150_000, "InvertedPendulum-v4": 150_000, "Acrobot-v1": 300_000, "Pendulum-v1": 300_000}


def measured() -> Iterator[Any]:
    stages = json.loads(RESULTS.read_text())["stages"]
    for curve in next(stage for stage in stages if stage["stage"] == "learning")["detail"]["curves"]:
        if curve["solved"] and " then " not in curve["task"]:
            yield pytest.param(curve, id=f"{curve['task']}-{curve['seed']}")


def measured_rows(curve: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Yield rows of a measured run: where its mean return of 100 episodes changed, about that many had ended."""
    length = STEPS_OF_AN_EPISODE.get(curve["task"].split()[0], lambda _: A_FEW)
    count, total, counted_to, before = 0.0, 0.0, 0, None
    for steps, seconds, score in zip(curve["env_steps"], curve["seconds"], curve["returns"], strict=True):
        if score != before:
            ended = (steps - counted_to) / max(1.0, length(score))
            count, total, counted_to, before = count + ended, total + ended * score, steps, score
        yield {
            **{"env_steps": steps, "seconds": seconds, "updates": steps / 2000, "skipped_updates": 0},
            **{"episodes": count, "returns": count, "return_sum": total, "return_mean_100": score},
        }


@pytest.mark.parametrize("curve", list(measured()))
def test_judge_run_that_learned_is_hardly_ever_said_not_to_learn(curve: dict[str, Any]) -> None:
    budget = BUDGETS.get(curve["task"].split()[0], 1_000_000)
    config = LearnerConfig(stop=StopConfig(env_steps=budget, return_mean_100=curve["target"]))
    rows = list(measured_rows(curve))
    moods = [judge(rows[:number], config, Signs()).mood for number in range(1, len(rows) + 1)]
    weights = np.diff([0.0, *curve["seconds"]])
    blamed = sum(weight for weight, mood in zip(weights, moods, strict=True) if mood is Mood.bad)
    assert blamed <= 0.25 * curve["seconds"][-1]
    assert moods[-1] is not Mood.bad
