"""One preset of each family: its environments are made, streamed and trained on. Sizes are small, nothing is learned.

Doom is forked from several threads, which gRPC has to be told before it is imported, so its actor is a real one.
"""

import re
from ctypes.util import find_library
from typing import Any

import envpool
import numpy as np
import pytest
import torch

from envs_server.pool import make_pool
from seedrl.actions import Actions
from seedrl.errors import ConfigError
from seedrl.rows import ENDED, LIFE, RESET, TERMINATED, TRUNCATED
from seedrl.serving.slots import Slots
from seedrl.specs import ArraySpec, ContinuousSpec, EnvSpec, discrete, names
from tests.fakes import make_job
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.processes import Commands, summary_of
from tests.integration.waiting import eventually
from tests.programs import missing
from tests.test_contracts import ROOT, composed

# Preset → leaves of an observation, and the action.
FAMILIES: dict[str, tuple[list[str], Any]] = {
    "atari": (["uint8[1, 84, 84]"], discrete(6)),
    "acrobot": (["float32[6]"], discrete(3)),
    "mountaincar": (["float32[2]"], discrete(3)),
    "pendulum": (["float32[3]"], ContinuousSpec((-2.0,), (2.0,), (1,))),
    "lunarlander_continuous": (["float32[8]"], ContinuousSpec((-1.0,) * 2, (1.0,) * 2, (2,))),
    "bipedalwalker": (["float32[24]"], ContinuousSpec((-1.0,) * 4, (1.0,) * 4, (4,))),
    "mujoco": (["float64[17]"], ContinuousSpec((-1.0,) * 6, (1.0,) * 6, (6,))),
    "dmc": (["float64[8]", "float64[9]"], ContinuousSpec((-1.0,) * 6, (1.0,) * 6, (6,))),
    "minigrid": (["int64[] below 4", "uint8[7, 7, 3]", "uint8[96]"], discrete(7)),
    "babyai": (["int64[] below 4", "uint8[7, 7, 3]", "uint8[512]"], discrete(7)),
    "procgen": (["uint8[3, 64, 64]"], discrete(15)),
    "toytext": (["int64[] below 16"], discrete(4)),
    "boardgame": (["int8[65]", "int8[8, 8, 2]"], discrete(65)),
    "football": (["uint8[72, 96, 4]"], discrete(19)),
}


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
@pytest.mark.parametrize("preset", FAMILIES)
def test_family_is_made_streamed_and_trained_on(
    start_learner: StartLearner, start_actor: StartActor, preset: str
) -> None:
    if preset == "procgen" and not find_library("Qt5Gui"):
        missing("libQt5Gui", "libqt5gui5")
    settings = composed("learner", [f"env={preset}"])
    learner = start_learner(env=settings.env, model=settings.model, metrics="")
    start_actor(learner.address, make_pool, threads=1)
    eventually(lambda: learner.service.learning.updates >= 3 or learner.ended())
    assert learner.service.learning.skipped_updates == 0
    spec = learner.service.inference.sessions.spec.result()
    observation, action = FAMILIES[preset]
    assert [str(leaf) for leaf in spec.observations] == observation
    assert spec.action == action


@pytest.mark.slow
def test_doom_is_made_streamed_and_trained_on(commands: Commands) -> None:
    run = commands.start(
        *("run", "env=vizdoom", "actors.envs=2", "algorithm.batch_size=2", "stop.env_steps=400", "run_dir=run"),
        *("display=plain", "metrics="),
        path=ROOT,
    )
    assert run.wait(300) == 0, run.err
    assert "observation uint8[3, 84, 84], 6 actions" in run.out
    assert summary_of(commands.directory / "run")["updates"] >= 3


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
@pytest.mark.parametrize("env_id", ["Taxi-v3", "CliffWalking-v1", "Blackjack-v1", "NChain-v0", "CarRacing-v3"])
def test_others_of_a_family_are_made_and_stepped(env_id: str) -> None:
    pool = make_pool(make_job(2, env_id=env_id), threads=1)
    for _ in range(5):
        rows = pool.recv()
        [leaf] = pool.spec.observations
        assert isinstance(leaf, ArraySpec)
        assert (rows.observation.shape, rows.observation.dtype) == ((2, *leaf.shape), leaf.dtype)
        shape, dtype = pool.spec.actions[0].shape, pool.spec.actions[0].dtype
        pool.send(np.zeros((2, *shape), dtype), rows.env_id)
    pool.close()


def documented_games() -> list[str]:
    text = (ROOT / "docs/environments.md").read_text()
    [block] = re.findall(r"<!-- the 57 games -->\n(.*?)\n\n", text, re.DOTALL)
    return re.findall(r"\w+-v5", block)


def test_all_57_games_are_there() -> None:
    games = documented_games()
    assert len(games) == len(set(games)) == 57
    assert set(games) <= set(envpool.list_all_envs())


def episode(options: dict[str, Any], steps: int) -> list[int]:
    pool = make_pool(make_job(1, env_id="Breakout-v5", options={"stack_num": 1, **options}), threads=1)
    flags = []
    for _ in range(steps):
        rows = pool.recv()
        flags.append(int(rows.flags[0]))
        pool.send(np.zeros(1, np.int32), rows.env_id)
    pool.close()
    return flags


def test_time_limit_of_atari_truncates() -> None:
    flags = episode({"max_episode_steps": 20}, 30)
    assert flags[0] == RESET
    assert TRUNCATED in flags
    assert flags[flags.index(TRUNCATED) + 1] == RESET
    assert settings_of_atari()["max_episode_steps"] * 4 == 108_000


def settings_of_atari() -> dict[str, Any]:
    return dict(composed("learner", ["env=atari"]).env.options)


def test_lost_life_ends_an_episode_if_asked_for() -> None:
    whole, lives = (episode({"episodic_life": each}, 130) for each in (False, True))
    assert sum(flag & TERMINATED for flag in lives) > sum(flag & TERMINATED for flag in whole)
    assert all(lives[row + 1] == RESET | flag & LIFE for row, flag in enumerate(lives[:-1]) if flag & ENDED)


def test_lives_are_streamed_and_trained_on(start_learner: StartLearner, start_actor: StartActor) -> None:
    """Games are counted, not lives: a game of Breakout has five, each of which lasts for several updates."""
    settings = composed("learner", ["env=breakout"])
    learner = start_learner(env=settings.env, model=settings.model, metrics="")
    start_actor(learner.address, make_pool, threads=1)
    eventually(lambda: learner.service.serving.episodes >= 1 or learner.ended())
    assert learner.service.serving.episodes >= 1
    assert learner.service.learning.skipped_updates == 0


def test_lives_of_a_game_add_up_to_what_the_game_is_worth_alone() -> None:
    """Only the last life ends a game: what is counted of lives is what envpool counts of games."""
    options = {"episodic_life": True, "noop_max": 1}
    pool = make_pool(make_job(4, env_id="Breakout-v5", options=options), threads=1)
    envs = envpool.make(
        "Breakout-v5", env_type="gymnasium", num_envs=4, seed=make_job(4).seed, num_threads=1, **options
    )
    envs.async_reset()
    slots = Slots(4, Actions(pool.spec), frame_stack=1, core_size=0, device=torch.device("cpu"))
    counted, expected, running = [], [], np.zeros(4)
    for step in range(400):
        rows, (_, reward, _, _, info) = pool.recv(), envs.recv()
        finished = slots.count_episodes(rows.env_id.astype(np.int64), rows.reward, rows.flags)
        counted += finished.returns.tolist()
        running[info["env_id"]] += reward
        expected += running[info["env_id"]][info["terminated"] != 0].tolist()
        running[info["env_id"]] *= info["terminated"] == 0
        action = np.full(4, (1, 2, 3, 2)[step % 4], np.int32)
        pool.send(action, rows.env_id)
        envs.send(action, info["env_id"])
    pool.close()
    assert len(counted) >= 4
    assert sum(counted) > 0
    assert counted == expected


def test_sticky_actions_are_taken_from_the_preset() -> None:
    assert settings_of_atari()["repeat_action_probability"] == 0.25
    make_pool(make_job(1, env_id="Breakout-v5", options=settings_of_atari()), threads=1).close()


def test_family_without_its_libraries_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ImportError("EnvPool Procgen requires the system Qt 5 runtime")

    monkeypatch.setattr(envpool, "make", fail)
    with pytest.raises(ConfigError, match=r"^envpool cannot make CoinrunEasy-v0 with .*: EnvPool Procgen requires"):
        make_pool(make_job(1, env_id="CoinrunEasy-v0"), threads=1)


def test_spec_of_a_dict_is_in_the_order_of_names() -> None:
    pool = make_pool(make_job(1, env_id="MiniGrid-Empty-5x5-v0"), threads=1)
    assert isinstance(pool.spec, EnvSpec)
    assert names(pool.spec.observation) == ["direction", "image", "mission"]
    pool.close()
