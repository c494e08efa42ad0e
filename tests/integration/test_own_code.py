"""Code of the user's own that is wrong, in whole runs: the line, the traceback and the exit code reach the screen."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.processes import Commands, Process

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
MODULE = """
import numpy as np
from torch import nn
from seedrl.specs import ArraySpec, discrete
from seedrl.types import ModelOutput


class Env:
    observation_space = ArraySpec((2,), "float32")
    action_space = discrete(2)

    def __init__(self, wrong=""):
        self.wrong = wrong
        if wrong == "constructor":
            raise RuntimeError("no simulator here")

    def reset(self, seed=None):
        self.random = np.random.default_rng(seed)
        self.steps = 0
        return self.random.random(2), {}

    def step(self, action):
        self.steps += 1
        if self.wrong == "step" and self.steps == 3:
            raise KeyError("third")
        ends = self.steps == 10
        if self.wrong == "old":
            return self.random.random(2), 1.0, ends, {}
        return self.random.random(3 if self.wrong == "shape" else 2), 1.0, ends, False, {}


class Linear(nn.Module):
    core_size = 0

    def __init__(self, spec, size=0):
        super().__init__()
        self.layer = nn.Linear(2, (size or spec.policy_size) + 1)

    def forward(self, inputs, core_state):
        heads = self.layer(inputs.observation)
        return ModelOutput(heads[..., :-1], heads[..., -1]), core_state
"""
SMALL = ("env.id=own_code:Env", "actors.envs=4", "algorithm.unroll_length=4", "algorithm.batch_size=4", "run_dir=run")


@pytest.fixture
def here(commands: Commands) -> Path:
    (commands.directory / "own_code.py").write_text(MODULE)
    return commands.directory


def run(commands: Commands, *settings: str) -> Process:
    process = commands.start("run", *SMALL, *settings)
    process.wait()
    return process


@pytest.mark.parametrize(
    ("wrong", "words", "has_traceback"),
    [
        ("constructor", "own_code.py:15 in __init__: the environment cannot be made with env.options=", True),
        ("step", "own_code.py:25 in step: the environment raised: KeyError('third'); ", True),
        ("old", "own_code.py:22 in step: step must return (observation, reward, terminated, truncated, info)", False),
        ("shape", "own_code.py:22 in step: observation: expected float32[2], as observation_space has it, saw", False),
    ],
)
def test_run_of_a_broken_environment_ends_at_once_with_its_line_and_traceback(
    here: Path, commands: Commands, wrong: str, words: str, has_traceback: bool
) -> None:
    process = run(commands, f"env.options.wrong={wrong}")
    assert process.wait() == 10
    first, line = [line for line in process.err.splitlines() if line.startswith("seedrl run: ")]
    assert first.endswith("why follows")
    assert line.removeprefix("seedrl run: ").startswith(words)
    assert ("Traceback (most recent call last):" in process.err) is has_traceback
    log = (here / "run/logs/actor-0.log").read_text()
    assert log.count("seedrl actor: ") == 1  # it was not started again
    assert words in log
    assert "restarting" not in process.err


def test_run_of_a_model_that_does_not_fit_names_what_was_expected(here: Path, commands: Commands) -> None:
    process = run(commands, "model.name=own_code:Linear", "model.options.size=7")
    assert process.wait() == 2
    assert process.err.startswith(
        "seedrl learner: own_code.py:39 in forward: model.name=own_code:Linear: expected logits"
    )
    assert "spec.policy_size, 2 for" in process.err


def test_run_of_a_model_that_raises_has_its_traceback_on_screen_and_in_the_log(here: Path, commands: Commands) -> None:
    process = run(commands, "model.name=own_code:Linear", "model.options.size=-7")
    assert process.wait() == 2
    assert process.err.startswith("seedrl learner: own_code.py:37 in __init__: model.name=own_code:Linear could not be")
    assert "Traceback (most recent call last):" in process.err
    said, look, resume = process.err.rstrip().rsplit("\n", 2)
    assert [look.split()[0], resume.split()[0]] == ["look", "resume"]
    assert (here / "run/logs/learner.log").read_text() == f"{said}\n"


def test_every_command_of_the_installed_script_finds_modules_in_the_working_directory(
    here: Path, commands: Commands
) -> None:
    process = run(commands, "model.name=own_code:Linear", "stop.env_steps=200", "model=auto")
    assert process.wait() == 0, process.err
    script = Path(sys.executable).with_name("seedrl")
    for arguments in (
        ["check", "env.id=own_code:Env", "model.name=own_code:Linear", "steps=50"],
        ["doctor", "env.id=own_code:Env", "model.name=own_code:Linear"],
        ["eval", "run=run", "episodes=4"],
        ["export", "run=run"],
        ["card", "run=run"],
    ):
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        done = subprocess.run([str(script), *arguments], cwd=here, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
