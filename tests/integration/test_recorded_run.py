"""A run that records its unrolls, and runs that train on them without actors, the same each time."""

from pathlib import Path

import pytest
import torch

from seedrl.errors import ConfigError
from tests.builders import weights
from tests.fakes import FakePool
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.waiting import eventually

MODEL = {"model__name": "tests.fakes:TinyModel"}


def record_run(directory: Path, start_learner: StartLearner, start_actor: StartActor) -> None:
    learner = start_learner(**MODEL, store__dump=str(directory))
    actor = start_actor(learner.address, FakePool)
    eventually(lambda: learner.service.serving.unrolls_made > 40)
    actor.stop()
    learner.stop()


def test_recorded_unrolls_train_a_run_without_actors_the_same_each_time(
    start_learner: StartLearner, start_actor: StartActor, tmp_path: Path
) -> None:
    record_run(tmp_path / "dump", start_learner, start_actor)
    results = []
    for number in range(2):
        learner = start_learner(
            **MODEL, run_dir=str(tmp_path / str(number)), source=str(tmp_path / "dump"), stop__env_steps=1200
        )
        summary = learner.join()
        assert (summary["status"], summary["episodes"]) == ("done", 0)
        assert learner.service.training is not None
        results.append((summary["updates"], weights(learner.service.training.learner.model)))
    (updates, first), (others, second) = results
    assert updates == others == 75  # of 4 unrolls of 4 steps
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_run_on_recorded_unrolls_turns_actors_away_and_says_what_it_trains_on(
    start_learner: StartLearner, start_actor: StartActor, tmp_path: Path
) -> None:
    record_run(tmp_path / "dump", start_learner, start_actor)
    learner = start_learner(**MODEL, run_dir=str(tmp_path / "offline"), source=str(tmp_path / "dump"))
    look = learner.service.monitor.status
    eventually(lambda: "The learner trains on recorded unrolls" in look().verdict.evidence)
    actor = start_actor(learner.address, FakePool, patience=0.5)
    eventually(actor.ended)
    assert learner.service.serving.sessions_refused["no_capacity"] >= 1
    learner.stop()


def test_source_that_is_not_there_is_refused_before_a_run_begins(start_learner: StartLearner, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no recorded unrolls"):
        start_learner(**MODEL, source=str(tmp_path / "nowhere"))
    assert not (tmp_path / "run").exists()
