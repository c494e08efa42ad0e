"""Does it learn? Whole runs of the command line, minutes each: `make test-learning`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from seedrl.trained.load import load_trained
from tests.tictactoe import play_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def train(run_dir: Path, *overrides: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "seedrl", "run", f"run_dir={run_dir}", "display=none", *overrides]
    subprocess.run(command, check=True, timeout=800)
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return summary


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_cartpole_every_seed_is_solved_within_500k_steps(tmp_path: Path, seed: int) -> None:
    summary = train(tmp_path, "env=cartpole", f"seed={seed}")
    assert summary["return_mean_100"] >= 475
    assert summary["env_steps"] <= 500_000


def test_catch_default_settings_is_solved(tmp_path: Path) -> None:
    assert train(tmp_path, "env=catch")["return_mean_100"] >= 0.95


def test_memory_task_with_lstm_is_solved(tmp_path: Path) -> None:
    assert train(tmp_path, "experiment=memory")["return_mean_100"] >= 475


def test_memory_task_without_lstm_is_not_solved(tmp_path: Path) -> None:
    summary = train(tmp_path, "experiment=memory", "model.lstm=0", "stop.env_steps=500_000")
    assert summary["return_mean_100"] < 150


@pytest.mark.parametrize(
    ("env", "score", "steps"),
    [
        ("CartPole-v1", 475, 150_000),
        ("Acrobot-v1", -100, 300_000),
        ("LunarLander-v3", 200, 1_000_000),
        ("Pendulum-v1", -200, 300_000),
        ("InvertedPendulum-v4", 950, 150_000),
    ],
)
def test_environment_is_solved_by_its_name_alone(tmp_path: Path, env: str, score: float, steps: int) -> None:
    goal = (f"stop.return_mean_100={score}", f"stop.env_steps={steps}")
    assert train(tmp_path, f"env.id={env}", *goal)["return_mean_100"] >= score


def test_tictactoe_is_learned_to_where_no_reply_beats_it(tmp_path: Path) -> None:
    """A perfect player's replies are among them."""
    train(tmp_path, "env=tictactoe")
    policy = load_trained(str(tmp_path))
    for begins in (True, False):
        results = play_all(policy, begins)
        assert results.lost == 0
        assert results.drawn > 0
