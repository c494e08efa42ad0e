"""The algorithm, the selector and the model of docs/algorithms.md, each in one file, train over a real stream."""

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import pytest

from seedrl.errors import ConfigError
from tests.documented import write_program
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.support import SignedPool, eventually

DOCUMENT = "docs/algorithms.md"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("my_algorithms", "my_selectors", "my_models", "my_auxiliary", "my_callbacks"):
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


@pytest.mark.usefixtures("written")
def test_callbacks_of_ones_own_see_a_whole_run(
    start_learner: StartLearner, start_actor: StartActor, tmp_path: Path
) -> None:
    learner = start_learner(callbacks=["my_callbacks:Journal"], callback_options={"Journal": {"every": 3}})
    start_actor(learner.address)
    service = learner.service
    eventually(lambda: service.learning.updates >= 12)
    learner.stop()
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    named = {name: [line for line in lines if line["event"] == name] for name in {line["event"] for line in lines}}
    assert {"joined", "left"} <= named.keys()
    assert (lines[0]["event"], lines[0]["actor"]) == ("joined", "actor-0")
    assert [line["updates"] for line in named["update"]][:4] == [3, 6, 9, 12]
    assert "policy_loss" in named["update"][-1]["values"]
    assert len(named["episode"]) == service.serving.episodes
    assert {(line["episode_return"], line["length"]) for line in named["episode"]} == {(5.0, 5)}
    assert [line["name"] for line in named["checkpoint"]] == [service.saver.newest]
    assert service.learning.callback_events_dropped == service.learning.callback_failures == 0


class Breaks:
    """A callback that fails in one way or the other with everything."""

    def __init__(self, run_dir: Path) -> None:
        pass

    def on_update(self, update: object) -> None:
        raise ArithmeticError("no update is good enough")

    def on_episode(self, episode: object) -> None:
        sys.exit("no more episodes")


def test_callbacks_that_fail_are_counted_and_training_continues(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner(callbacks=[f"{__name__}:Breaks"])
    start_actor(learner.address)
    learning = learner.service.learning
    eventually(lambda: learning.updates >= 12 and learning.callback_failures >= 24)
    learner.stop()
    assert learning.callback_events_dropped == 0


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"model__name": "no_such_module:Net"}, r"model\.name=no_such_module:Net: there is no module no_such_module"),
        ({"algorithm__name": "tests.fakes:Sarsa"}, r"algorithm\.name=tests\.fakes:Sarsa: tests\.fakes has no Sarsa"),
        ({"store__select": "no_such_module:Ring"}, r"store\.select=no_such_module:Ring: there is no module"),
    ],
)
def test_own_code_that_is_not_there_is_refused_before_an_actor_joins(
    start_learner: StartLearner, setting: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{words}"):
        start_learner(**setting)
