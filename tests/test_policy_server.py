"""The settings that serve a trained policy hold nothing of its training, so every run can be served and evaluated."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from seedrl.config import LearnerConfig, ServeConfig
from seedrl.roles.policy_server import settings_of
from seedrl.roles.serve import serve_settings
from seedrl.run.directory import plain
from seedrl.serving.seats import Exploration, final_exploration
from seedrl.validation import check


def leave_run(directory: Path, settings: dict[str, Any]) -> str:
    """Write config.yaml as a learner with these settings does; a dot separates a group from its setting."""
    config = plain(LearnerConfig())
    for name, value in settings.items():
        group, _, key = name.rpartition(".")
        (config[group] if group else config)[key] = value
    directory.mkdir()
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    return str(directory)


OF_TRAINING: dict[str, dict[str, Any]] = {
    "at most": {"actors.at_most": 4},
    "two ranks": {"ranks.count": 2, "listen": "0.0.0.0:50051", "ranks.advertise": "10.0.0.1"},
    "separate": {"ranks.count": 2, "ranks.separate": True},
    "lockstep": {"lockstep": True},
    "evaluation": {"actors.evaluation": 0.5, "actors.count": 8},
    "serving": {"serving.min_rows": 200, "serving.max_wait": 1.0, "serving.max_slots": 4096},
    "training": {"algorithm.batch_size": 64, "store.capacity": 64, "stop.env_steps": 5, "init_from": "elsewhere"},
    "secure": {"security.token_file": "token", "metrics": "0.0.0.0:9464", "socket": "unix:gone"},
    "reports": {"report.wandb": "project", "report.video_seconds": 60.0},
}


@pytest.mark.parametrize("settings", OF_TRAINING.values(), ids=OF_TRAINING)
def test_served_settings_are_the_same_however_the_run_was_trained(tmp_path: Path, settings: dict[str, Any]) -> None:
    plain_run, run = leave_run(tmp_path / "plain", {}), leave_run(tmp_path / "run", settings)
    served = settings_of(run, envs=3)
    served.run_dir = plain_run
    assert served == settings_of(plain_run, envs=3)
    check(settings_of(run))
    check(serve_settings(ServeConfig(run=run, listen="127.0.0.1:50052")))


def test_served_settings_keep_the_environment_and_the_model(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "run", {"env.id": "Pong-v5", "env.frame_stack": 4, "model.name": "nature"})
    served = settings_of(run)
    assert (served.env.id, served.env.frame_stack, served.model.name) == ("Pong-v5", 4, "nature")


def test_served_settings_keep_the_exploration_that_a_policy_which_is_not_greedy_acts_with(tmp_path: Path) -> None:
    run = leave_run(tmp_path / "run", {"exploration.temperature": 0.0, "exploration.epsilon": 0.25})
    assert final_exploration(settings_of(run).exploration) == Exploration(0.0, 0.25)


@pytest.mark.parametrize(("envs", "groups"), [(0, 2), (1, 1), (7, 1), (8, 2)])
def test_served_environments_are_the_runs_or_as_many_as_asked_for(tmp_path: Path, envs: int, groups: int) -> None:
    served = settings_of(leave_run(tmp_path / "run", {}), envs)
    assert (served.actors.envs, served.actors.groups) == (envs or 8, groups)
    assert served.serving.max_slots == served.actors.envs
