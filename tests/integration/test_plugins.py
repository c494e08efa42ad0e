"""The algorithm, the selector and the model of docs/algorithms.md, each in one file, train over a real stream."""

import importlib
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.documented import write_program
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.support import SignedPool, eventually

DOCUMENT = "docs/algorithms.md"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("my_algorithms", "my_selectors", "my_models", "my_auxiliary"):
        write_program(f"{name}.py", DOCUMENT, tmp_path)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("written")
def test_algorithm_of_ones_own_trains_over_a_real_stream(start_learner: StartLearner, start_actor: StartActor) -> None:
    learner = start_learner(algorithm__name="my_algorithms:Reinforce", algorithm__options={"gain": 2.0})
    start_actor(learner.address)
    learning = learner.service.learning
    eventually(lambda: learning.updates >= 12)
    assert learning.skipped_updates == 0
    assert set(learning.algorithm) == {"loss", "mean_log_prob"}


@pytest.mark.usefixtures("written")
def test_selector_of_ones_own_replays_over_a_real_stream(
    start_learner: StartLearner, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring is always full and the actors are never held back; priorities come back to the selector."""
    preferred: list[int] = []
    selectors = importlib.import_module("my_selectors")
    monkeypatch.setattr(selectors.Uniform, "prefer", lambda _, entries, priority: preferred.extend(entries.tolist()))
    learner = start_learner(
        algorithm__name="my_algorithms:Reinforce",
        store__select="my_selectors:Uniform",
        store__options={"least": 8},
        store__capacity=16,
    )
    actor = start_actor(learner.address)
    learning, serving = learner.service.learning, learner.service.serving
    eventually(lambda: learning.updates >= 20 and serving.unrolls_made > 32)
    assert learner.service.training is not None
    store = learner.service.training.store
    assert preferred
    assert store.ready >= 8
    assert not actor.ended()


@pytest.mark.usefixtures("written")
def test_model_of_ones_own_trains_over_a_real_stream(start_learner: StartLearner, start_actor: StartActor) -> None:
    learner = start_learner(model__name="my_models:Linear", model__options={"scale": 0.5})
    start_actor(learner.address)
    eventually(lambda: learner.service.learning.updates >= 12)


@pytest.mark.usefixtures("written")
@pytest.mark.parametrize("name", ["ppo", "my_algorithms:Reinforce"])
def test_auxiliary_loss_of_ones_own_model_is_trained_on_images_by_any_algorithm(
    name: str, start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner(
        algorithm__name=name, model__name="my_auxiliary:PredictsReward", model__options={"cost": 0.2}
    )
    start_actor(learner.address, partial(SignedPool, shape=(1, 40, 40)))
    learning = learner.service.learning
    eventually(lambda: learning.gradient_steps >= 12)
    assert learning.skipped_updates == 0
    assert learning.algorithm["aux_reward"] > 0
