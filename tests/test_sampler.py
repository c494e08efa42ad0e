"""Rates, shares and means from counters read at two times, and the verdict on them."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seedrl.config import LearnerConfig
from seedrl.metrics import LearningMetrics, ServingMetrics
from seedrl.monitoring.diagnosis import diagnose
from seedrl.monitoring.history import History
from seedrl.monitoring.sampler import CYCLE, Row, Sampler
from seedrl.serving.seats import planned_seats
from seedrl.serving.sessions import SessionTable
from seedrl.status import Verdict
from seedrl.wire.messages import Hello, Report
from tests.fakes import FakeClock


class Scene:
    """A learner's counters, a clock, and one actor with two groups."""

    def __init__(self, seconds_before: float = 0.0) -> None:
        self.config = LearnerConfig()
        self.clock = FakeClock()
        self.serving, self.learning = ServingMetrics(), LearningMetrics()
        self.sessions = SessionTable(self.config, lambda session: session, planned_seats(self.config))
        self.session, _ = self.sessions.join(Hello("actor"))
        self.sampler = Sampler(
            self.config, self.serving, self.learning, self.sessions, seconds_before, clock=self.clock
        )
        self.before = self.sampler.totals()

    def serve(self, requests: int, latency: float, **waits: float) -> None:
        """Requests answered after so many seconds each, of which they waited for these causes."""
        for _ in range(requests):
            self.serving.act_latency_seconds.observe(latency)
            for cause, seconds in waits.items():
                self.serving.queue_seconds[cause] += seconds

    def row(self) -> Row:
        return self.sampler.row(self.before, self.sampler.totals())


def test_row_rates_are_of_the_time_in_between() -> None:
    scene = Scene(seconds_before=50.0)
    scene.clock.advance(2.0)
    scene.serving.env_steps, scene.serving.rows, scene.serving.batches = 100, 120, 4
    scene.learning.updates = 6
    row = scene.row()
    assert (row["seconds"], row["env_steps"], row["steps_per_second"]) == (52.0, 100, 50.0)
    assert (row["updates_per_second"], row["inference_batch"]) == (3.0, 30.0)


def test_row_before_anything_happened_has_zeros_and_no_return() -> None:
    scene = Scene()
    row = scene.row()
    assert row["return_mean_100"] is None
    assert row["steps_per_second"] == row["policy_lag"] == row["learner_wait_fraction"] == 0.0


def test_row_stages_are_shares_of_their_thread() -> None:
    scene = Scene()
    scene.clock.advance(10.0)
    scene.learning.learner_seconds.update(wait=1.0, forward=2.0, backward=5.0)
    scene.serving.serving_seconds.update(forward=3.0, idle=1.0)
    row = scene.row()
    assert row["learner_wait_fraction"] == row["learner/wait"] == 0.125
    assert (row["serving/forward"], row["serving/idle"], row["serving/read"]) == (0.75, 0.25, 0.0)
    assert sum(value for name, value in row.items() if name.startswith("learner/")) == pytest.approx(1.0)


def test_row_reuse_counts_every_gradient_step_on_an_unroll() -> None:
    scene = Scene()
    scene.serving.unrolls_made, scene.learning.unrolls_trained, scene.learning.unroll_uses = 10, 10, 20
    assert scene.row()["reuse"] == 2.0


def test_row_has_every_value_that_the_algorithm_reports() -> None:
    scene = Scene()
    scene.learning.algorithm.update({"td_error": 0.5, "surprise": 2.0})
    scene.learning.grad_norm = 3.0
    row = scene.row()
    assert {name: value for name, value in row.items() if name.startswith("algorithm/")} == {
        "algorithm/td_error": 0.5,
        "algorithm/surprise": 2.0,
    }
    assert row["grad_norm"] == 3.0


def test_row_before_the_first_report_has_no_false_zeros_of_the_learner() -> None:
    row = Scene().row()
    assert not [name for name in row if name.startswith("algorithm/") or name in ("grad_norm", "learning_rate")]


def test_row_reward_per_step_needs_no_episode_to_end() -> None:
    scene = Scene()
    scene.serving.env_steps, scene.serving.reward_sum = 200, 50.0
    row = scene.row()
    assert (row["return_mean_100"], row["reward_per_step"]) == (None, 0.25)


def test_row_without_a_step_has_no_reward_per_step_rather_than_a_false_zero() -> None:
    scene = Scene()
    scene.clock.advance(5.0)
    assert "reward_per_step" not in scene.row()


def test_row_quantiles_are_those_of_the_returns_and_not_of_buckets() -> None:
    scene = Scene()
    scene.serving.returns.extend([0.9, 0.95, 0.96, 0.97, 1.0])
    scene.serving.episode_return.observe_all(np.array(scene.serving.returns))
    row = scene.row()
    assert row["return_p50"] == 0.96
    assert 0.9 < row["return_p10"] < 0.95
    assert (row["returns"], row["return_sum"]) == (5, pytest.approx(4.78))


def test_row_cycle_follows_littles_law() -> None:
    """Two groups and 100 requests in 10 s: a cycle takes 200 ms, of which the rest after the round trip is env."""
    scene = Scene()
    scene.serve(100, latency=0.05, hold=0.01, fill=0.02, busy=0.005)
    scene.session.traffic.requests = 100
    scene.session.measure(Report(requests=100, round_trip_seconds=100 * 0.08))
    scene.clock.advance(10.0)
    expected = {"env": 0.120, "network": 0.030, "hold": 0.010, "fill": 0.020, "inference": 0.020}
    assert {part: 0.2 * scene.row()[f"cycle/{part}"] for part in CYCLE} == pytest.approx(expected, abs=1e-5)


def test_row_cycle_counts_what_is_unread_while_batches_run_as_inference() -> None:
    scene = Scene()
    scene.serve(100, latency=0.05)
    scene.serving.serving_seconds["forward"] = 7.5  # of 10 s
    scene.session.traffic.requests = 100
    scene.session.measure(Report(requests=100, round_trip_seconds=100 * 0.09))
    scene.clock.advance(10.0)
    row = scene.row()
    assert 0.2 * row["cycle/network"] == pytest.approx(0.01, abs=1e-5)
    assert 0.2 * row["cycle/inference"] == pytest.approx(0.08, abs=1e-5)


@pytest.mark.parametrize(("held", "part"), [(0.0, "env"), (9.0, "hold")])
def test_row_cycle_without_any_answer_is_all_env_or_all_hold(held: float, part: str) -> None:
    scene = Scene()
    scene.serving.serving_seconds["hold"] = held
    scene.clock.advance(10.0)
    assert scene.row()[f"cycle/{part}"] == 1.0


# Verdicts on rows; tests/integration/test_bottlenecks.py has the real thing.


def made_row(**changes: Any) -> Row:
    scene = Scene()
    scene.clock.advance(1.0)
    shares = {f"cycle/{part}": 0.0 for part in CYCLE}
    return {**scene.row(), **shares, "actors": 1, "updates": 10, "learner_wait_fraction": 0.5, **changes}


@pytest.mark.parametrize(
    ("part", "bottleneck", "setting"),
    [
        ("env", "env", "actors.count"),
        ("network", "network", "actors.groups"),
        ("hold", "store", "store.capacity"),
        ("fill", "batching", "serving.min_rows"),
        ("inference", "inference", "device"),
    ],
)
def test_diagnose_learner_that_waits_blames_the_largest_part(part: str, bottleneck: str, setting: str) -> None:
    verdict = diagnose(made_row(**{f"cycle/{part}": 0.6, "cycle/env": 0.6 if part == "env" else 0.4}), LearnerConfig())
    assert verdict.bottleneck == bottleneck
    assert setting in verdict.change
    assert "50%" in verdict.evidence
    assert "60%" in verdict.evidence


@pytest.mark.parametrize(("paused", "words"), [(3, "All actors are paused"), (1, "1 of 3 actors is paused")])
def test_diagnose_paused_actors_are_said_to_be_paused_whatever_else_there_is(paused: int, words: str) -> None:
    verdict = diagnose(made_row(actors=3, paused_actors=paused, **{"cycle/env": 0.9}), LearnerConfig())
    assert verdict.bottleneck == "paused"
    assert verdict.evidence.startswith(words)
    assert "seedrl control resume" in verdict.change


def test_diagnose_on_policy_run_is_not_told_that_its_store_is_full() -> None:
    row = made_row(learner_wait_fraction=0.12, **{"cycle/hold": 0.9, "cycle/env": 0.1})
    assert diagnose(row, LearnerConfig()).bottleneck == "store"
    verdict = diagnose(row, LearnerConfig(), is_on_policy=True)
    assert verdict.bottleneck == "learner"
    assert "take turns" in verdict.evidence
    assert "88%" in verdict.evidence


def test_diagnose_learner_that_hardly_waits_is_the_limit_whatever_the_cycle() -> None:
    row = made_row(learner_wait_fraction=0.05, **{"cycle/env": 0.9, "learner/backward": 0.7})
    verdict = diagnose(row, LearnerConfig())
    assert verdict.bottleneck == "learner"
    assert "backward (70%)" in verdict.evidence


@pytest.mark.parametrize("nothing", [{"actors": 0}, {"updates": 0}])
def test_diagnose_without_actors_or_updates_does_not_judge(nothing: dict[str, int]) -> None:
    assert diagnose(made_row(**nothing), LearnerConfig()).bottleneck == "none"


def test_diagnose_update_longer_than_the_look_says_so() -> None:
    assert "longer than this sample" in diagnose(made_row(learner_wait_fraction=0.0), LearnerConfig()).evidence


def test_diagnose_lock_step_run_is_not_told_to_enlarge_its_store() -> None:
    verdict = diagnose(made_row(**{"cycle/hold": 0.9}), LearnerConfig(lockstep=True))
    assert verdict.change == "Set lockstep=false."


def replay_row(**changes: Any) -> Row:
    return made_row(**{"limit/filling": 0.0, "limit/learner": 0.0, "limit/actors": 0.0, **changes})


def test_diagnose_memory_that_fills_says_when_training_begins() -> None:
    config = LearnerConfig()
    config.store.min_size = 5000
    verdict = diagnose(replay_row(updates=0, **{"limit/filling": 1.0}), config)
    assert verdict == Verdict(
        "none", "Training begins when the store has 5,000 unrolls.", "Wait, or lower store.min_size."
    )


def test_diagnose_learner_held_back_by_the_ratio_names_it_beside_the_actors() -> None:
    config = LearnerConfig()
    config.store.samples_per_insert = 4
    verdict = diagnose(replay_row(**{"limit/learner": 0.9, "cycle/env": 0.9}), config)
    assert verdict.bottleneck == "env"
    assert "50% of its time, held back by store.samples_per_insert=4;" in verdict.evidence
    assert "actors.count" in verdict.change
    assert "raise store.samples_per_insert" in verdict.change


def test_diagnose_actors_held_back_by_the_ratio_names_it() -> None:
    config = LearnerConfig()
    config.store.samples_per_insert = 4
    row = replay_row(learner_wait_fraction=0.01, **{"limit/actors": 0.9, "cycle/hold": 0.8, "learner/backward": 0.7})
    verdict = diagnose(row, config)
    assert verdict.bottleneck == "learner"
    assert "held back 80% of their cycle by store.samples_per_insert=4" in verdict.evidence
    assert verdict.change.startswith("Lower store.samples_per_insert")


def test_diagnose_sides_that_wait_in_turns_names_the_band() -> None:
    config = LearnerConfig()
    config.store.tolerance = 40.0
    verdict = diagnose(replay_row(**{"limit/actors": 0.5, "limit/learner": 0.5, "cycle/hold": 0.7}), config)
    assert verdict.bottleneck == "store"
    assert verdict.change.startswith("Raise store.tolerance (now 40).")


def test_diagnose_on_many_cores_with_few_threads_names_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seedrl.monitoring.diagnosis.available_cores", lambda: 32)
    verdict = diagnose(made_row(learner_wait_fraction=0.0), LearnerConfig(threads=2))
    assert "threads (now 2 of 32 cores)" in verdict.change


# History


def test_history_of_some_columns_has_their_finite_numbers_alone() -> None:
    history = History()
    history.add({"env_steps": 1, "a": 2.0, "b": None})
    history.add({"env_steps": 2, "a": float("nan"), "b": 3.0, "c": 4.0})
    assert history.rows(("a", "c", "missing")) == [{"a": 2.0}, {"c": 4.0}]


@pytest.mark.parametrize("count", [1, 9, 10, 11, 1000, 17_281])
def test_history_beyond_its_limit_keeps_the_whole_run_evenly(count: int) -> None:
    history = History(limit=10)
    for steps in range(count):
        history.add({"env_steps": steps})
    kept = [row["env_steps"] for row in history.rows()]
    assert len(kept) <= 11
    assert (kept[0], kept[-1]) == (0, count - 1)
    assert len({after - before for before, after in itertools.pairwise(kept[:-1])}) <= 1
    assert max(itertools.starmap(lambda before, after: after - before, itertools.pairwise(kept)), default=0) <= (
        1 + count // 4
    )


def test_history_of_a_resumed_run_leaves_out_what_a_crash_has_cut_off_or_undone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = ['{"env_steps": 1}', '{"env_steps": 5}', '{"env_st{"env_steps": 2}', "5", "null", '{"env_steps": 3}', '{"e']
    path.write_text("\n".join(lines))
    history = History()
    history.load(path)
    history.load(tmp_path / "missing.jsonl")
    history.add({"env_steps": 4})
    assert [row["env_steps"] for row in history.rows()] == [1, 3, 4]
