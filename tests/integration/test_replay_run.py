"""Replay memories in a real learner with a real stream: the ratio is kept, and the side that waits is named."""

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import envs_server.session
import seedrl.roles.learner
from seedrl.rows import Rows
from seedrl.sizes import store_tolerance
from seedrl.types import ModelInput, ModelOutput
from tests.builders import weights
from tests.fakes import FakePool
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.support import OracleModel, RunningLearner, SignedPool
from tests.integration.waiting import eventually

SLOW = 0.02  # seconds
RATIO = 3.0
LONG = ("priority", "mixed")
SETTINGS = {
    "store__select": "uniform",
    "store__capacity": 64,
    "store__min_size": 12,
    "store__samples_per_insert": RATIO,
}


@pytest.fixture(autouse=True)
def _frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seedrl.roles.learner, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(envs_server.session, "REPORT_SECONDS", 0.2)


class SlowTraining(OracleModel):
    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        if torch.is_grad_enabled():
            time.sleep(SLOW)
        return super().forward(inputs, core_state)


class SlowPool(SignedPool):
    def recv(self) -> Rows:
        time.sleep(SLOW)
        return super().recv()


def assert_ratio(learner: RunningLearner) -> None:
    """Samples are within the band of what inserts have earned. Stop first: the two are counted by two threads."""
    learner.stop()
    made, trained = learner.service.serving.unrolls_made, learner.service.learning.unrolls_trained
    config = learner.service.config
    earned = RATIO * (made - config.store.min_size)
    slack = store_tolerance(config) + RATIO * config.actors.envs  # unrolls may pass min_size together
    assert trained > 100
    assert abs(earned - trained) <= slack, (earned, trained, slack)


def assert_exported(learner: RunningLearner, side: str) -> None:
    """The dashboards get the shares of time that `metrics.jsonl` has."""
    reporter = learner.service.monitor._reporter
    reporter.refresh()
    assert set(reporter.state.store_limited) == {"filling", "learner", "actors"}
    eventually(lambda: (reporter.refresh(), reporter.state.store_limited[side] > 0)[1])  # type: ignore[func-returns-value]


def test_ratio_is_kept_if_the_learner_is_slow_and_the_verdict_names_it(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner(**SETTINGS, model__name=f"{__name__}:SlowTraining")
    actor = start_actor(learner.address)
    look = learner.service.monitor.status
    status = eventually(
        lambda: (s := look()).verdict.bottleneck == "learner" and s.row["limit/actors"] and s.row["updates"] > 50 and s
    )
    assert "by store.samples_per_insert=3" in status.verdict.evidence
    assert "Lower store.samples_per_insert" in status.verdict.change
    assert_exported(learner, "actors")
    actor.stop()
    assert_ratio(learner)


def test_ratio_is_kept_if_actors_are_slow_and_the_verdict_names_it(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner(**SETTINGS)
    actor = start_actor(learner.address, SlowPool)
    look = learner.service.monitor.status
    eventually(lambda: "Training begins when the store has 12 unrolls" in look().verdict.evidence)
    status = eventually(
        lambda: (s := look()).verdict.bottleneck == "env" and s.row["limit/learner"] and s.row["updates"] > 50 and s
    )
    assert "held back by store.samples_per_insert=3" in status.verdict.evidence
    assert "raise store.samples_per_insert" in status.verdict.change
    assert_exported(learner, "learner")
    actor.stop()
    assert_ratio(learner)


@pytest.mark.parametrize("select", ["uniform", *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
def test_lockstep_run_with_replay_repeats_bit_for_bit(
    select: str, start_learner: StartLearner, start_actor: StartActor, tmp_path: Path
) -> None:
    """No step is taken and no unroll handed over during an update, or the two runs would pick other unrolls."""
    narrow = {"store__samples_per_insert": 2.0, "store__tolerance": 3.0}  # unrolls that end together wait for updates
    ratio = {} if select == "mixed" else narrow
    results = []
    for number in range(2):
        learner = start_learner(
            run_dir=str(tmp_path / str(number)),
            lockstep=True,
            store__select=select,
            store__capacity=24,
            model__name="tests.fakes:TinyModel",
            stop__env_steps=800,
            **ratio,
        )
        start_actor(learner.address, FakePool)
        summary = learner.join()
        assert learner.service.training is not None
        results.append((summary["updates"], weights(learner.service.training.learner.model)))
    (updates, first), (others, second) = results
    assert updates == others > 20
    assert all(torch.equal(first[name], second[name]) for name in first)
