"""Tests of which algorithm trains a run: status shows it, and another one can take its weights but not resume it."""

from functools import partial
from pathlib import Path

import pytest

from seedrl.errors import ConfigError, RunDirectoryError
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.support import SignedPool, eventually


def test_run_is_resumed_by_its_own_algorithm_only_and_others_may_start_from_its_weights(
    start_learner: StartLearner, start_actor: StartActor, tmp_path: Path
) -> None:
    settings = {"algorithm__name": "ppo", "algorithm__passes": 2, "algorithm__minibatches": 0}
    learner = start_learner(**settings)
    start_actor(learner.address)
    eventually(lambda: learner.service.learning.updates >= 2)
    assert learner.service.monitor.status().algorithm == "ppo (2 passes × 32 minibatches)"
    learner.stop()

    with pytest.raises(RunDirectoryError, match=r"is trained with ppo, and algorithm\.name=vtrace cannot resume it"):
        start_learner()
    other = start_learner(run_dir=str(tmp_path / "other"), init_from=str(tmp_path / "run"))
    start_actor(other.address)
    eventually(lambda: other.service.learning.updates >= 2)
    assert other.service.monitor.status().algorithm == "vtrace (1 pass × 1 minibatch)"
    other.stop()

    resumed = start_learner(**settings)
    eventually(lambda: resumed.service.training is not None)
    assert resumed.service.learning.updates >= 2


def test_weights_of_another_environment_are_refused_with_what_differs(
    start_learner: StartLearner, start_actor: StartActor, tmp_path: Path
) -> None:
    learner = start_learner(model__name="mlp")
    start_actor(learner.address)
    eventually(lambda: learner.service.learning.updates >= 1)
    learner.stop()
    other = start_learner(run_dir=str(tmp_path / "other"), init_from=str(tmp_path / "run"), model__name="mlp")
    start_actor(other.address, partial(SignedPool, shape=(5,)))
    words = rf"^init_from={tmp_path}/run: the checkpoint does not fit this model: .* is \[.*\] here.*other spaces"
    with pytest.raises(ConfigError, match=words):
        other.join()
