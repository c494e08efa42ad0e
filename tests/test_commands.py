"""The command line: what it says, what it refuses, and that asking costs no import of torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from seedrl import __version__
from seedrl.algorithms.build import BUILT_IN
from seedrl.commands import COMMANDS, main, settings_of
from tests.integration.processes import Commands

HEAVY = ("torch", "grpc", "envpool")


def imported(err: str) -> set[str]:
    """Top-level modules in the output of -X importtime."""
    lines = [line for line in err.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


# Asking.


@pytest.mark.parametrize("arguments", [[], ["run", "--help"], ["actor", "--help"], ["learner", "--cfg", "job"]])
def test_question_imports_nothing_heavy(commands: Commands, arguments: list[str]) -> None:
    code, out, err = commands.run(*arguments, PYTHONPROFILEIMPORTTIME="1")
    assert code == 0
    assert out
    assert "omegaconf" in imported(err)  # so this is how imports are found
    assert imported(err).isdisjoint(HEAVY)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_shows_every_key_with_meaning_and_default(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    main([name, "--help"])
    shown = capsys.readouterr().out.splitlines()
    settings = list(settings_of(COMMANDS[name].schema))
    assert settings
    for key, default, meaning in settings:
        (line,) = [line for line in shown if line.split()[:1] == [key]]
        assert meaning in line
        assert line.endswith(f"[{default}]")


def test_help_lists_the_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "--help"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("algorithm.name ")]
    listed = line.split(maxsplit=1)[1]
    for name in (*BUILT_IN, "your.module:Class"):
        assert f"{name} " in listed


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_overview_shows_every_command_with_its_meaning(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    main(arguments)
    shown = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"seedrl {name}" in shown
        assert command.meaning in shown


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out == f"seedrl {__version__}\n"


def test_cfg_shows_the_settings_that_would_be_used_and_starts_nothing(commands: Commands) -> None:
    code, out, _ = commands.run("run", "--cfg", "job", "env=catch", "algorithm.batch_size=3")
    settings = yaml.safe_load(out)
    assert code == 0
    assert settings["env"]["id"] == "Catch-v0"
    assert settings["algorithm"]["batch_size"] == 3
    assert not (commands.directory / "runs").exists()


def test_envs_server_module_is_the_actor_command(commands: Commands) -> None:
    assert commands.run("--help", module="envs_server") == commands.run("actor", "--help")


# Refusing.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "algoritm.batch_size=4"], "algoritm"),
        (["run", "stop.steps=4"], "stop.steps"),
        (["learner", "serving.max_row=4"], "serving.max_row"),
        (["actor", "learner=localhost:1", "thread=4"], "thread"),
    ],
)
def test_unknown_key_is_refused_by_name(commands: Commands, arguments: list[str], words: str) -> None:
    code, _, err = commands.run(*arguments)
    assert code != 0
    assert f"Could not override '{words}" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "key", "seen"),
    [
        (["run", "seed=abc"], "seed", "abc"),
        (["run", "algorithm.optimizer=sgd"], "algorithm.optimizer", "sgd"),
        (["learner", "algorithm.batch_size=2.5"], "algorithm.batch_size", "2.5"),
        (["actor", "learner=localhost:1", "patience=soon"], "patience", "soon"),
    ],
)
def test_value_of_the_wrong_type_is_refused_by_name(
    commands: Commands, arguments: list[str], key: str, seen: str
) -> None:
    code, _, err = commands.run(*arguments)
    assert code != 0
    assert f"full_key: {key}" in err
    assert seen in err
    assert "Traceback" not in err


def test_unknown_choice_is_refused_with_those_there_are(commands: Commands) -> None:
    code, _, err = commands.run("run", "env=pongg")
    assert code != 0
    assert "env/pongg" in err
    assert "cartpole" in err


def test_settings_that_cannot_work_together_are_refused_before_anything_starts(commands: Commands) -> None:
    code, out, err = commands.run("run", "actors.envs=3", "actors.groups=2")
    assert code == 2
    assert err == "seedrl run: actors.groups=2 must divide actors.envs=3\n"
    assert out == ""
    assert not (commands.directory / "runs").exists()


def test_actor_without_an_address_is_told_what_is_missing(commands: Commands) -> None:
    code, _, err = commands.run("actor")
    assert code == 2
    assert "learner" in err
    assert err.count("\n") == 1


def test_unknown_command_is_refused_with_those_there_are(commands: Commands) -> None:
    code, _, err = commands.run("trian")
    assert code != 0
    assert "'trian'" in err
    for name in COMMANDS:
        assert name in err


def test_command_finds_modules_of_the_working_directory(tmp_path: Path) -> None:
    """Like `python -m seedrl`, the program `seedrl` can be given modules that lie where it is started."""
    (tmp_path / "mine.py").touch()
    program = "from seedrl.commands import main; main(['--version']); import mine"
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0
