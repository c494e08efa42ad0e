"""The command line: what it says, what it refuses, and that asking costs no import of torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from seedrl import __version__
from seedrl.algorithms.build import BUILT_IN
from seedrl.commandline.checking import checked
from seedrl.commandline.line import read
from seedrl.commandline.main import compose, main, vocabulary
from seedrl.commandline.settings import settings_of
from seedrl.commandline.suggestions import ELSEWHERE
from seedrl.commands import COMMANDS
from tests.integration.processes import Commands
from tests.trained_runs import leave_trained

HEAVY = ("torch", "grpc", "envpool")
LINES, COLUMNS = 24, 100  # one screen
OFTEN = COMMANDS["run"].often


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
    assert "difflib" in imported(err)  # so this is how imports are found
    assert imported(err).isdisjoint(HEAVY)


@pytest.mark.parametrize("arguments", [["completion", "words", "run", "env="], ["run", "--help", "all"], ["--version"]])
def test_question_that_takes_no_settings_does_not_even_import_hydra(commands: Commands, arguments: list[str]) -> None:
    code, _, err = commands.run(*arguments, PYTHONPROFILEIMPORTTIME="1")
    assert code == 0
    assert imported(err).isdisjoint({*HEAVY, "hydra", "omegaconf", "numpy", "yaml", "rich"})


@pytest.mark.parametrize("name", COMMANDS)
def test_help_all_shows_every_key_with_meaning_and_default(capsys: pytest.CaptureFixture[str], name: str) -> None:
    main([name, "--help", "all"])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= COLUMNS
    shown = " ".join(out.split())
    settings = list(settings_of(COMMANDS[name].schema))
    assert settings
    for setting in settings:
        assert f"{setting.key}={setting.shown} {' '.join(setting.meaning.split())} " in f"{shown} "


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_one_screen(capsys: pytest.CaptureFixture[str], name: str) -> None:
    main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS


def test_help_of_run_has_five_examples_and_ten_settings_with_the_presets_values(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["run", "env=pong", "--help", "seed=7"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("seedrl run [RUN] key=value")
    assert len([line for line in lines[1:] if line.startswith("seedrl run ")]) == 5
    settings = {line.split("=")[0]: line.split("=")[1].split()[0] for line in lines if line.split("=")[0] in OFTEN}
    assert len(settings) == len(OFTEN) == 10
    assert {key: settings[key] for key in ("env.id", "stop.env_steps", "algorithm.name", "seed")} == {
        "env.id": "Pong-v5",
        "stop.env_steps": "5_000_000",
        "algorithm.name": "vtrace",
        "seed": "7",
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_help_examples_are_lines_that_work(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An example may be explained after some spaces."""
    leave_trained(tmp_path / "runs/CartPole-v1/20260101-120000")
    monkeypatch.chdir(tmp_path)
    for example in COMMANDS[name].examples:
        command, *arguments = example.partition("  ")[0].split()
        line = read(COMMANDS[command], vocabulary(command), arguments)
        accepted = checked(vocabulary(command), line.overrides, line.is_sweep)
        assert command == name
        assert line.is_sweep or compose(command, accepted)


def test_help_lists_the_algorithms(capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", "--help", "all"])
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("algorithm.name=")]
    listed = line.split(maxsplit=1)[1]
    for name in (*BUILT_IN, "your.module:Class"):
        assert f"{name} " in f"{listed} "


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_overview_shows_every_command_with_its_meaning(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    main(arguments)
    shown = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert f"seedrl {name}" in shown
        assert command.meaning in shown


@pytest.mark.parametrize(
    "arguments", [["--version"], ["run", "--version"], ["--version", "run"], ["run", "env=pong", "--version", "-m"]]
)
def test_version_is_the_packages_wherever_it_is_asked_for(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    main(arguments)
    assert capsys.readouterr().out == f"seedrl {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["help", "eval"], ["eval", "-h"], ["--help", "eval"], ["eval", "--help", "seed=1"]]
)
def test_help_of_a_command_is_shown_wherever_it_is_asked_for(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    main(arguments)
    assert capsys.readouterr().out.startswith("seedrl eval ")


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


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the one line that a command is refused with, without what begins every such line."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.strip().removeprefix(f"seedrl {arguments[0]}: ")


@pytest.mark.parametrize(
    ("arguments", "key", "meant"),
    [
        (["run", "algoritm.batch_size=4"], "algoritm.batch_size", "algorithm.batch_size"),
        (["run", "+algorithm.learning_rte=0.1"], "algorithm.learning_rte", "algorithm.learning_rate"),
        (["run", "++algorithm.learning_rte=0.1"], "algorithm.learning_rte", "algorithm.learning_rate"),
        (["run", "+lr=0.1", "env=pong"], "lr", "algorithm.learning_rate"),
        (["run", "-m", "lr=0.1,0.2"], "lr", "algorithm.learning_rate"),
        (["run", "learning_rate=0.1"], "learning_rate", "algorithm.learning_rate"),
        (["run", "epsilon=0.1"], "epsilon", "exploration.epsilon or algorithm.epsilon"),
        (["run", "gamma=0.9"], "gamma", "algorithm.discount"),
        (["run", "algorithm.ent_coeff=0.9"], "algorithm.ent_coeff", "algorithm.entropy_cost"),
        (["run", "stop.steps=4"], "stop.steps", "stop.env_steps"),
        (["run", "env.option.size=4"], "env.option.size", "env.options"),
        (["learner", "serving.max_row=4"], "serving.max_row", "serving.max_rows"),
        (["actor", "learner=localhost:1", "thread=4"], "thread", "threads"),
    ],
)
def test_unknown_key_is_refused_with_the_one_that_was_meant(
    capsys: pytest.CaptureFixture[str], arguments: list[str], key: str, meant: str
) -> None:
    said = refusal(capsys, *arguments)
    assert said.startswith(f"there is no setting {key}; did you mean ")
    assert set(said.removesuffix("?").partition("mean ")[2].split(" or ")) == set(meant.split(" or "))


def test_unknown_key_that_is_like_no_other_is_refused_with_where_they_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = refusal(capsys, "run", "xyzzy=1")
    assert said == "there is no setting xyzzy; seedrl run --help all lists the settings"


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_keys_of_free_settings_may_be_new(prefix: str) -> None:
    config = compose("run", ["env=pong", f"{prefix}env.options.stack_num=2", f"{prefix}env.options.own.key=3"])
    assert config.env.options == {"stack_num": 2, "own": {"key": 3}}
    assert compose("run", [f"{prefix}launch.actor.env.NAME=x"]).launch.actor.env == {"NAME": "x"}
    assert compose("run", [f"{prefix}callback_options.Mine.key=1"]).callback_options == {"Mine": {"key": 1}}


def test_key_with_a_plus_that_exists_is_simply_set() -> None:
    assert compose("run", ["+seed=3", "++algorithm.batch_size=4"]).seed == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "seed=abc"], "seed=abc must be a whole number"),
        (["run", "stop.env_steps=1.5"], "stop.env_steps=1.5 must be a whole number"),
        (["run", "stop.env_steps=.inf"], "stop.env_steps=.inf must be a whole number"),
        (["run", "lockstep=7.5"], "lockstep=7.5 must be true or false"),
        (["run", "algorithm.entropy_cost=lots"], "algorithm.entropy_cost=lots must be a number or null"),
        (["run", "model.layers=3"], "model.layers=3 must be a list such as [64,64]"),
        (
            ["run", "algorithm.optimizer=admm"],
            "algorithm.optimizer=admm must be one of adam, rmsprop; did you mean adam?",
        ),
        (["learner", "algorithm.batch_size=2.5"], "algorithm.batch_size=2.5 must be a whole number"),
        (["actor", "learner=localhost:1", "patience=soon"], "patience=soon must be a number"),
        (["run", "stop=4"], "stop is a group of settings: stop.env_steps, stop.return_mean_100"),
        (["run", "~seed"], "~seed would remove a setting; give it another value: seed=1"),
    ],
)
def test_value_of_the_wrong_type_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert refusal(capsys, *arguments) == words


@pytest.mark.parametrize("number", ["1e6", "1_000_000", "1000000", "1.0e6", "+1e+6"])
def test_whole_number_may_be_written_in_several_ways(number: str) -> None:
    assert compose("run", [f"stop.env_steps={number}"]).stop.env_steps == 1_000_000


def test_number_with_commas_is_refused_with_how_to_write_it(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "run", "stop.env_steps=1,000,000")
    assert said.endswith("a number has no commas: stop.env_steps=1000000")


def test_text_with_special_characters_needs_no_quotes_of_hydra() -> None:
    assert compose("run", ["run_dir=runs/a=b,c:(d)"]).run_dir == "runs/a=b,c:(d)"


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("env=pongg", "there is no preset env=pongg; did you mean env=pong?"),
        ("env=Acrobot-v1", "there is no preset env=Acrobot-v1; did you mean env=acrobot or env.id=Acrobot-v1?"),
        ("algorithm=pp0", "there is no preset algorithm=pp0; did you mean algorithm=ppo?"),
        ("experiment=xyzzy", "there is no preset experiment=xyzzy; there are memory, minigrid_memory, "),
    ],
)
def test_unknown_preset_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str], choice: str, words: str
) -> None:
    assert refusal(capsys, "run", choice).startswith(words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "cartpole"], "cartpole alone is no setting; did you mean env=cartpole?"),
        (["run", "seed"], "seed needs a value: seed=VALUE"),
        (["run", "--seed", "3"], "there is no option --seed; settings are written without dashes: seed=3"),
        (["run", "--seed=3"], "there is no option --seed=3; settings are written without dashes: seed=3"),
        (["run", "--hlep"], "there is no option --hlep; did you mean --help?"),
        (["status", "--jsn"], "there is no option --jsn; did you mean --json?"),
    ],
)
def test_word_or_option_that_means_nothing_is_refused_with_what_was_meant(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert refusal(capsys, *arguments) == words


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


@pytest.mark.parametrize(("word", "meant"), [("trian", "run"), ("train", "run"), ("sttaus", "status")])
def test_unknown_command_is_refused_with_the_nearest(word: str, meant: str) -> None:
    with pytest.raises(SystemExit, match=f"there is no command {word}; did you mean seedrl {meant}"):
        main([word])


def test_unknown_command_that_is_like_no_other_is_refused_with_those_there_are() -> None:
    with pytest.raises(SystemExit) as end:
        main(["xyzzy"])
    for name in COMMANDS:
        assert name in str(end.value)


def test_names_of_other_libraries_all_mean_something_that_exists() -> None:
    known = {*vocabulary("run").settings, *COMMANDS}
    assert [ours for ours in ELSEWHERE.values() if ours not in known] == []


def test_command_finds_modules_of_the_working_directory(tmp_path: Path) -> None:
    """Like `python -m seedrl`, the program `seedrl` can be given modules that lie where it is started."""
    (tmp_path / "mine.py").touch()
    program = "from seedrl.commandline.main import main; main(['--version']); import mine"
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0
