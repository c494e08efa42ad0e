"""Runs are found: by a word, as the newest, and wherever they lie; and plain words become settings."""

import json
import os
from pathlib import Path

import pytest

from seedrl.commandline.line import read
from seedrl.commandline.main import vocabulary
from seedrl.commands import COMMANDS
from seedrl.errors import ConfigError
from seedrl.launching.overrides import override
from seedrl.run.finding import find_run, newest_run, remember, runs_below


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def leave_run(path: str | Path, ran_at: float, is_trained: bool = False) -> Path:
    run = Path(path)
    run.mkdir(parents=True)
    for name in ("config.yaml", "context.json"):
        (run / name).touch()
        os.utime(run / name, (ran_at, ran_at))
    if is_trained:
        (run / "checkpoints" / "000000000100").mkdir(parents=True)
    return run


@pytest.mark.parametrize("path", ["runs/x", "runs/CartPole-v1/20260101-120000", "runs/sweep/of/many/members"])
def test_newest_run_is_found_at_any_depth_below_runs(path: str) -> None:
    leave_run("runs/CartPole-v1/earlier", ran_at=1)
    leave_run(path, ran_at=3)
    leave_run("runs/another", ran_at=2)
    assert newest_run() == Path(path)


def test_newest_run_that_was_started_from_here_is_found_elsewhere(tmp_path: Path) -> None:
    leave_run("runs/x", ran_at=1)
    run = leave_run(tmp_path / "scratch" / "it's far", ran_at=2)
    remember(run)
    assert newest_run() == run
    near = leave_run("experiment", ran_at=3)
    remember(near)
    assert newest_run() == Path("experiment")


def test_newest_run_is_not_one_that_was_started_from_another_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = leave_run("runs/x", ran_at=1).absolute()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    remember(leave_run(tmp_path / "scratch", ran_at=2))
    monkeypatch.chdir(tmp_path / "here")
    assert newest_run().absolute() == mine


def test_newest_run_may_have_to_be_trained() -> None:
    leave_run("runs/trained", ran_at=1, is_trained=True)
    leave_run("runs/just_begun", ran_at=2)
    assert newest_run() == Path("runs/just_begun")
    assert newest_run(must_be_trained=True) == Path("runs/trained")
    assert find_run("", must_be_trained=True) == Path("runs/trained")


def test_newest_run_that_was_deleted_is_forgotten(tmp_path: Path) -> None:
    gone, run = leave_run(tmp_path / "gone", ran_at=2), leave_run(tmp_path / "run", ran_at=1)
    remember(gone)
    for path in gone.iterdir():
        path.unlink()
    gone.rmdir()
    remember(run)
    assert newest_run() == run
    assert list(json.loads((tmp_path / "state/seedrl/runs.json").read_text())) == [str(run)]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1}'])
def test_newest_run_is_found_although_the_list_is_damaged(tmp_path: Path, content: str) -> None:
    (tmp_path / "state/seedrl").mkdir(parents=True)
    (tmp_path / "state/seedrl/runs.json").write_text(content)
    run = leave_run(tmp_path / "run", ran_at=1)
    remember(run)
    assert newest_run() == run


def test_newest_run_where_there_is_none_says_where_it_was_looked_for() -> None:
    with pytest.raises(ConfigError, match=r"^there is no run below runs/, nor was one started from here; name one"):
        newest_run()


def test_find_run_takes_a_run_or_a_directory_that_holds_some() -> None:
    leave_run("runs/a/1", ran_at=2)
    leave_run("runs/a/2", ran_at=1)
    assert find_run("runs/a/2") == Path("runs/a/2")
    assert find_run("runs/a") == Path("runs/a/1")


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("nowhere", "there is no directory nowhere"),
        ("afile", "afile is a file, not a run directory"),
        ("empty", "empty holds no run"),
    ],
)
def test_find_run_names_what_is_wrong_with_a_word(word: str, words: str) -> None:
    Path("afile").touch()
    Path("empty").mkdir()
    with pytest.raises(ConfigError, match=f"^{words}$"):
        find_run(word)


def test_runs_below_does_not_look_into_runs() -> None:
    """Further ranks have directories of the same kind below that of the run."""
    leave_run("runs/a", ran_at=1)
    leave_run("runs/a/ranks/1", ran_at=2)
    assert list(runs_below(Path("runs"))) == [Path("runs/a")]


# Plain words.


def overrides_of(command: str, *arguments: str) -> list[str]:
    return read(COMMANDS[command], vocabulary(command), arguments).overrides


def test_words_a_run_becomes_a_setting_whatever_is_in_its_name() -> None:
    for name in ("runs/x", "lr=0.1, it's", "a b"):
        Path(name).mkdir(parents=True)
        assert overrides_of("eval", name, "episodes=3", "--json") == ["episodes=3", "json=true", override("run", name)]


def test_words_of_an_option_are_left_to_it() -> None:
    assert overrides_of("eval", "--cfg", "job", "runs/x") == [override("run", "runs/x")]


def test_words_several_runs_are_refused_where_one_is_needed() -> None:
    with pytest.raises(ConfigError, match="a and b are 2 runs, and this command takes one"):
        overrides_of("eval", "a", "b")


def test_words_orders_and_a_run_are_told_apart() -> None:
    leave_run("runs/x", ran_at=1)
    settings = overrides_of("control", "pause", "runs/x", "actor=a")
    assert settings == ["actor=a", override("do", ["pause"]), override("run", "runs/x")]


def test_words_for_a_command_that_trains_have_to_name_a_run() -> None:
    """Otherwise `seedrl run pong` would train CartPole in a directory called pong."""
    leave_run("runs/x", ran_at=1)
    assert overrides_of("run", "runs/x") == [override("run_dir", "runs/x")]
    with pytest.raises(ConfigError, match=r"^pong alone is no setting; did you mean env=pong\?$"):
        overrides_of("run", "pong")
    with pytest.raises(ConfigError, match=r"^runs is no run to resume: there is no runs/config.yaml$"):
        overrides_of("run", "runs")
