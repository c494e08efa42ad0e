"""Environments with Gymnasium's interface through a real stream into real updates, and what an actor may import."""

import multiprocessing
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from envs_server.pool import make_pool
from envs_server.shares import PREFIX
from seedrl.config import ActorConfig
from seedrl.errors import ConfigError, EnvBroken, EnvFailed
from seedrl.specs import discrete
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.processes import Commands, summary_of
from tests.integration.support import RunningActor
from tests.integration.waiting import eventually
from tests.simulators import Counter, released_at_the_end

ROOT = Path(__file__).parents[2]

# Processes take seconds to start, so that only the long tier has them.
THREADS_OR_PROCESSES = pytest.mark.parametrize(
    "processes", [False, pytest.param(True, marks=pytest.mark.long)], ids=["threads", "processes"]
)


def trains(learner: Any, updates: int = 5) -> bool:
    eventually(lambda: learner.service.learning.updates >= updates or learner.ended())
    return not learner.ended() and learner.service.learning.skipped_updates == 0


@THREADS_OR_PROCESSES
def test_gymnasium_environment_is_streamed_and_trained_on(
    start_learner: StartLearner, start_actor: StartActor, processes: bool
) -> None:
    learner = start_learner(env__id="gymnasium:CartPole-v1", env__processes=processes, model__name="auto", metrics="")
    actor = start_actor(learner.address, make_pool, threads=2)
    assert trains(learner)
    spec = learner.service.inference.sessions.spec.result()
    assert (spec.observation.shape, spec.action) == ((4,), discrete(2))
    actor.stop()
    eventually(lambda: [child for child in multiprocessing.active_children() if child.name.startswith(PREFIX)] == [])


def test_mask_of_gymnasiums_taxi_is_kept_to(start_learner: StartLearner, start_actor: StartActor) -> None:
    learner = start_learner(env__id="gymnasium:Taxi-v4", model__name="auto", metrics="")
    start_actor(learner.address, make_pool, threads=1)
    assert trains(learner)
    assert learner.service.inference.sessions.spec.result().mask == "action_mask"


@THREADS_OR_PROCESSES
def test_hanging_environment_is_noticed_and_made_anew(
    start_learner: StartLearner, start_actor: StartActor, processes: bool
) -> None:
    learner = start_learner(
        env__id="tests.simulators:Counter",
        env__options={"trouble": "hang", "at": 40},
        env__processes=processes,
        model__name="auto",
        metrics="",
    )
    with released_at_the_end():
        actor = start_actor(learner.address, make_pool, modules=["tests.simulators"], step_deadline=1.0, threads=1)
        # The learner's first answer may take longer than the deadline, and then the actor joins again before this.
        eventually(lambda: actor.says("has not answered for 1 s; making new environments"))
        steps = learner.env_steps
        eventually(lambda: learner.env_steps > steps)


@pytest.mark.long
def test_run_command_steps_ones_own_environment_in_processes(commands: Commands) -> None:
    (commands.directory / "mygame.py").write_text(
        "import gymnasium\ndef make(length):\n    return gymnasium.make('CartPole-v1', max_episode_steps=length)\n"
    )
    run = commands.start(
        *("run", "env.id=mygame:make", "env.options={length: 20}", "env.processes=true", "run_dir=run"),
        *(
            "actors.envs=4",
            "stop.env_steps=2000",
            "algorithm=impala",
            "algorithm.batch_size=4",
            "display=plain",
            "metrics=",
        ),
        path=Path(f"{commands.directory}{os.pathsep}{ROOT}"),
    )
    assert run.wait() == 0, run.err
    assert summary_of(commands.directory / "run")["updates"] >= 20


# What a learner may have an actor import.

FOREIGN = "tests.simulators"


@pytest.mark.parametrize(
    "env",
    [
        {"env__id": f"{FOREIGN}:Counter"},
        {"env__wrappers": [f"{FOREIGN}:Counter"]},
        {"env__wrappers": [FOREIGN]},
    ],
    ids=["environment", "wrapper", "wrapper-without-a-name"],
)
def test_learner_that_asks_for_a_module_that_is_not_allowed_is_refused(
    start_learner: StartLearner, start_actor: StartActor, env: dict[str, Any]
) -> None:
    learner = start_learner(metrics="", **env)
    asked: list[Any] = []
    actor = start_actor(learner.address, asked.append, modules=["gymnasium", "mygame"])
    with pytest.raises(ConfigError) as refused:
        actor.join()
    assert str(refused.value) == (
        f"the learner asks for {FOREIGN}, which this actor may not import; allow it with "
        f"modules=[gymnasium,mygame,{FOREIGN}]"
    )
    assert asked == []


def test_wrapper_without_a_name_is_refused_before_anything_is_imported(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    sys.modules.pop("antigravity", None)
    learner = start_learner(env__id="mock", env__wrappers=["antigravity"], metrics="")
    actor = start_actor(learner.address, make_pool, modules=["antigravity"])
    with pytest.raises(ConfigError, match=r"env\.wrappers: expected your\.module:Wrapper, saw antigravity"):
        actor.join()
    assert "antigravity" not in sys.modules


# Environments that actors bring.


@pytest.mark.parametrize("env_id", ["own", "own/counter"])
def test_own_environment_gets_the_learners_options(
    start_learner: StartLearner, start_actor: StartActor, env_id: str
) -> None:
    learner = start_learner(env__id=env_id, env__options={"length": 7}, model__name="auto", metrics="")
    made: list[Counter] = []

    def make(**options: Any) -> Counter:
        made.append(Counter(**options))
        return made[-1]

    start_actor(learner.address, partial(make_pool, make_env=make))
    assert trains(learner)
    assert {env.length for env in made} == {7}
    assert len(made) == learner.service.config.actors.envs


def test_actor_without_an_environment_is_told_that_it_should_bring_one(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner(env__id="own", metrics="")
    with pytest.raises(ConfigError, match=r"^the learner has env\.id=own: its actors bring the environment, and this"):
        start_actor(learner.address, make_pool).join()


def test_actor_with_an_environment_is_told_what_the_learner_trains_on(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner(env__id="CartPole-v1", metrics="")
    actor = start_actor(learner.address, partial(make_pool, make_env=Counter))
    with pytest.raises(ConfigError, match=r"the learner has env\.id=CartPole-v1; start it with env\.id=own$"):
        actor.join()


def test_environment_that_fails_too_often_ends_its_actor(start_learner: StartLearner) -> None:
    options = {"trouble": "raise", "at": 100}
    learner = start_learner(env__id="own", env__options=options, model__name="auto", metrics="")
    actor = RunningActor(ActorConfig(learner=learner.address, max_env_failures=1), partial(make_pool, make_env=Counter))
    with pytest.raises(
        EnvFailed, match=r"failed 2 times.*; last: tests/simulators\.py:\d+ in _have_trouble: the env"
    ) as raised:
        actor.join()
    assert raised.value.exit_code == 5
    assert raised.value.traceback.endswith("ArithmeticError: no such luck")


@THREADS_OR_PROCESSES
def test_environment_that_fails_in_its_first_steps_ends_its_actor_at_once(
    start_learner: StartLearner, processes: bool
) -> None:
    options = {"trouble": "raise", "at": 5}
    learner = start_learner(
        env__id="own", env__options=options, env__processes=processes, model__name="auto", metrics=""
    )
    actor = RunningActor(ActorConfig(learner=learner.address), partial(make_pool, make_env=Counter))
    with pytest.raises(
        EnvBroken, match=r"^tests/simulators\.py:\d+ in _have_trouble: .*no such luck.*first steps"
    ) as raised:
        actor.join()
    assert raised.value.traceback.endswith("ArithmeticError: no such luck")
    assert len(actor.pools) == 1
