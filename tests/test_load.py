"""`seedrl.load`: one observation or many, memory, resets, and what is refused."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import seedrl
from envs_server.spaces import spec_of
from seedrl.config import EnvConfig, ModelConfig
from seedrl.errors import ConfigError
from seedrl.specs import ArraySpec, CategoricalSpec, ContinuousSpec, EnvSpec
from tests.documented import program
from tests.fakes import make_spec
from tests.trained_runs import CARTPOLE, leave_trained

MEMORY = ModelConfig(layers=[8], lstm=4)
GENERATOR = np.random.default_rng(5)


@pytest.fixture
def recurrent(tmp_path: Path) -> Path:
    """A run with memory and stacked frames."""
    return leave_trained(tmp_path / "run", CARTPOLE, EnvConfig(frame_stack=2), MEMORY)


def test_import_of_seedrl_does_not_import_torch() -> None:
    program = "import sys, seedrl; seedrl.load; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_load_acts_alike_in_one_environment_and_in_many(recurrent: Path) -> None:
    many, ones = seedrl.load(recurrent), [seedrl.load(recurrent) for _ in range(3)]
    for _ in range(6):
        observations, rewards = GENERATOR.normal(size=(3, 4)), GENERATOR.normal(size=3)
        actions = many.act(observations, rewards)
        assert actions.shape == (3,)
        single = [one.act(*each) for one, *each in zip(ones, observations, rewards, strict=True)]
        assert all(type(action) is int for action in single)
        assert single == actions.tolist()


def values(policy: Any, observations: Any) -> list[float]:
    """Return a number that depends on the whole state: the state of the core after these observations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for observation in observations:
            policy.act(observation)
    return [round(value, 6) for value in policy._player._core_state.flatten().tolist()]


def test_load_reset_begins_an_episode_where_it_is_asked_to(recurrent: Path) -> None:
    first, second = GENERATOR.normal(size=(2, 5, 2, 4)).astype(np.float32)
    fresh = values(seedrl.load(recurrent), second)
    units = len(fresh) // 2
    policy = seedrl.load(recurrent)
    values(policy, first)
    continued = values(policy, second)
    assert continued != fresh
    for where, expected in (
        (None, fresh),
        ([True, True], fresh),
        (np.array([1]), [*continued[:units], *fresh[units:]]),
        ([False, True], [*continued[:units], *fresh[units:]]),
        ([], continued),
    ):
        policy.reset()
        values(policy, first)
        policy.reset(where)
        assert values(policy, second) == expected


def test_load_keeps_a_stack_of_frames(tmp_path: Path) -> None:
    run = leave_trained(tmp_path / "run", make_spec((2,)), EnvConfig(frame_stack=3), ModelConfig(layers=[8]))
    policy = seedrl.load(run)
    for number in range(4):
        policy.act(np.full(2, number, np.float32))
    assert policy._player is not None
    assert policy._player._stack._frames[0][0, :, 0].tolist() == [1, 2, 3]
    policy.reset()
    policy.act(np.full(2, 9, np.float32))
    assert policy._player._stack._frames[0][0, :, 0].tolist() == [9, 9, 9]


def test_load_draws_actions_by_chance_that_a_seed_repeats(tmp_path: Path) -> None:
    run = leave_trained(tmp_path / "run")
    observation = np.tile(GENERATOR.normal(size=4), (200, 1))
    drawn = [seedrl.load(run, greedy=False, seed=seed).act(observation).tolist() for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert set(drawn[0]) == {0, 1}
    assert len(set(seedrl.load(run).act(observation).tolist())) == 1


def test_load_takes_nested_observations_obeys_masks_and_returns_trees(tmp_path: Path) -> None:
    spec = EnvSpec(
        {
            "action_mask": ArraySpec((3,), "int8"),
            "body/0": ArraySpec((2,), "float32"),
            "body/1": ArraySpec((), "int64", 5),
        },
        {"arm": ContinuousSpec((-1.0, 0.0), (1.0, 4.0), (2,)), "hand": CategoricalSpec((3,))},
    )
    run = leave_trained(tmp_path / "run", spec)
    for allowed in range(3):
        mask = np.arange(3) == allowed
        action = seedrl.load(run).act({"body": (np.ones(2), 4), "action_mask": mask})
        assert action["hand"] == allowed
        assert action["arm"].shape == (2,)
        assert (np.array([-1, 0]) <= action["arm"]).all()
        assert (action["arm"] <= np.array([1, 4])).all()


def test_load_with_an_environment_speaks_the_language_of_its_spaces(tmp_path: Path) -> None:
    class Env:
        observation_space = gymnasium.spaces.Dict({"room": gymnasium.spaces.Discrete(5, start=10)})
        action_space = gymnasium.spaces.Tuple(
            (gymnasium.spaces.Discrete(3, start=-1), gymnasium.spaces.Box(-1, 1, (2,), np.float64))
        )

    spec = spec_of(Env.observation_space, Env.action_space, "Env")
    run = leave_trained(tmp_path / "run", spec)
    action = seedrl.load(run, env=Env()).act({"room": 14})
    assert Env.action_space.contains(action)
    plain = seedrl.load(run).act({"room": 4})
    assert action[0] == plain["0"] - 1
    with pytest.raises(ConfigError, match="but the policy was trained on"):
        seedrl.load(run, env=gymnasium.make("CartPole-v1"))


@pytest.mark.parametrize(
    ("observation", "words"),
    [
        (np.zeros(5), r"observation has the shape \[5\], but \[4\] or \[N, …\] is expected"),
        ({"a": np.zeros(4)}, r"the observation has a; the policy was trained on one array"),
        (np.zeros((3, 4)), r"the policy acts in one environment, and this is an observation of 3; call reset\(\)"),
    ],
)
def test_load_refuses_an_observation_that_does_not_fit(tmp_path: Path, observation: Any, words: str) -> None:
    policy = seedrl.load(leave_trained(tmp_path / "run"))
    policy.act(np.zeros(4))
    with pytest.raises(ConfigError, match=words):
        policy.act(observation)


def test_load_warns_once_if_a_policy_with_memory_gets_no_rewards(recurrent: Path) -> None:
    policy = seedrl.load(recurrent)
    policy.act(np.zeros(4))  # there is no reward yet
    with pytest.warns(UserWarning, match=r"call act\(observation, reward\)"):
        policy.act(np.zeros(4))
    policy.act(np.zeros(4))


def test_load_finds_the_newest_run_and_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    leave_trained(Path("runs/x"), steps=100, score=5.0)
    leave_trained(Path("runs/x"), steps=200, score=1.0)
    policy = seedrl.load()
    assert (policy.run, policy.env_id, policy.env_steps) == (Path("runs/x"), "CartPole-v1", 200)
    assert seedrl.load("runs/x", "best").env_steps == 100
    with pytest.raises(ConfigError, match="there is no directory nowhere"):
        seedrl.load("nowhere")
    with pytest.raises(ConfigError, match=r"device='gpu' is none of auto, cpu, cuda, cuda:NUMBER"):
        seedrl.load(device="gpu")


@pytest.mark.parametrize("name", ["play.py", "several.py"])
def test_load_program_of_the_documentation_plays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    leave_trained(Path("runs/CartPole-v1/20260101-120000"), steps=100, score=1.0)
    found: dict[str, Any] = {}
    exec(program(name, "docs/python.md"), found)  # noqa: S102
    if name == "play.py":
        assert capsys.readouterr().out == f"CartPole-v1 100 {found['score']}\n"
        assert found["score"] > 0
    else:
        assert (found["scores"] > 0).all()
