"""`seedrl.load`: the actions of a served policy, in a program of one's own."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import seedrl
from seedrl.config import EnvConfig, EvalConfig, ModelConfig
from seedrl.roles.evaluate import evaluate
from seedrl.rows import RESET
from seedrl.run.snapshot import chosen_checkpoint
from seedrl.specs import ArraySpec, ContinuousSpec, EnvSpec, discrete
from tests.recording import VARIABLE
from tests.trained_runs import leave_trained

ENVS, EPISODES, STACK = 4, 12, 3
RECORDER = "tests.recording:Recorder"


def leave_pole(run_dir: Path, options: dict[str, Any], spec: EnvSpec, squash: bool = False) -> Path:
    """Leave a run with memory, stacked frames and random weights."""
    env = EnvConfig(id=options.pop("id"), options=options, wrappers=[RECORDER], frame_stack=STACK)
    return leave_trained(run_dir, spec, env, ModelConfig(layers=[16], lstm=8, squash=squash))


@pytest.mark.parametrize(
    ("options", "spec"),
    [
        ({"id": "CartPole-v1", "max_episode_steps": 30}, EnvSpec(ArraySpec((4,), "float32"), discrete(2))),
        pytest.param(
            {"id": "Pendulum-v1", "max_episode_steps": 12},
            EnvSpec(ArraySpec((3,), "float32"), ContinuousSpec((-2.0,), (2.0,), (1,))),
            marks=pytest.mark.long,
        ),
    ],
    ids=["discrete", "continuous"],
)
def test_load_acts_as_the_served_policy_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], spec: EnvSpec
) -> None:
    """Memory, stacked frames, the last action and rewards: with the same observations come the same actions."""
    run = leave_pole(tmp_path / "run", dict(options), spec)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "record.jsonl"))
    config = EvalConfig(run=str(run), episodes=EPISODES, envs=ENVS)
    evaluate(config, chosen_checkpoint(run, "newest", warn=print), seed=1)
    rows = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    of_env = [[row for row in rows if row["env"] == env] for env in range(ENVS)]
    steps = min(map(len, of_env))
    assert steps > 20
    assert sum(bool(row["flags"] & RESET) for row in rows) > ENVS  # episodes have ended and begun

    together, alone = seedrl.load(run), seedrl.load(run)
    for step in range(steps):
        now = [of_env[env][step] for env in range(ENVS)]
        begins = np.array([bool(row["flags"] & RESET) for row in now])
        together.reset(begins)
        observation = np.array([row["observation"] for row in now], np.float32)
        rewards = np.array([row["reward"] for row in now], np.float32)
        expected = np.array([row["action"] for row in now])
        np.testing.assert_allclose(together.act(observation, rewards), expected, rtol=1e-4, atol=1e-5)
        if begins[0]:
            alone.reset()
        np.testing.assert_allclose(alone.act(observation[0], rewards[0]), expected[0], rtol=1e-4, atol=1e-5)
