"""Tests of how `seedrl run` starts ranks through torchrun, and what it makes of their ends; nothing is started here."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from seedrl.config import Engine, RunConfig
from seedrl.launching import actors, learner_process
from seedrl.launching.actors import ActorFleet
from seedrl.launching.learner_process import LearnerProcess
from seedrl.launching.process_notes import ProcessNotes
from seedrl.launching.torchrun import ERROR_FILE_VARIABLE, failed_codes, is_under_torchrun, write_error_file
from seedrl.run.context import LEARNER, ContextFile, State
from seedrl.run.directory import RunDirectory


class FakeProcess:
    pid = 4242

    def __init__(self) -> None:
        self.code: int | None = None
        self.is_terminated = False

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.is_terminated = True


class Started(NamedTuple):
    learner: LearnerProcess
    context: ContextFile
    error_files: Path
    commands: list[tuple[str, ...]]
    variables: list[dict[str, str]]


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    """Start a learner of two ranks and three actors as processes that are fakes."""
    commands: list[tuple[str, ...]] = []
    variables: list[dict[str, str]] = []

    def start(*command: str, env: dict[str, str], **_: Any) -> FakeProcess:
        commands.append(command)
        variables.append(env)
        return FakeProcess()

    monkeypatch.setattr(learner_process, "start_module", start)
    monkeypatch.setattr(actors, "start_module", start)
    config = RunConfig(run_dir=str(tmp_path / "run"), max_restarts=3)
    config.ranks.count, config.actors.count, config.launch.engine = 2, 3, Engine.torchrun
    config.launch.env, config.launch.actor.env = {"A": "job", "B": "job"}, {"B": "actor"}
    run = RunDirectory.prepare(config)
    notes = ProcessNotes(ContextFile(run.path), has_torchrun=True)
    learner = LearnerProcess(config, ["env=cartpole", "ranks.count=2"], run.path, tmp_path, notes)
    learner.child.start()
    ActorFleet(config, learner.address, run.logs, notes).start()
    return Started(learner, notes.file, tmp_path / "torchrun", commands, variables)


def test_run_starts_ranks_through_torchrun_with_the_settings_of_a_learner(started: Started) -> None:
    learner, *_ = started.commands
    assert learner[:3] == ("seedrl.launching.torchrun", "2", "3")
    assert learner[4:6] == ("env=cartpole", "ranks.count=2")
    assert f"socket='{started.learner.address}'" in learner


def test_run_shares_actors_out_among_the_ranks(started: Started) -> None:
    addresses = [next(word for word in command if word.startswith("learner=")) for command in started.commands[1:]]
    socket = started.learner.address
    assert addresses == [f"learner='{socket}'", f"learner='{socket}.1'", f"learner='{socket}'"]


def test_run_gives_children_the_variables_of_their_role(started: Started) -> None:
    learner, actor, *_ = started.variables
    assert (learner["A"], learner["B"]) == ("job", "job")
    assert (actor["A"], actor["B"]) == ("job", "actor")


def process_of(started: Started) -> FakeProcess:
    process: Any = started.learner.child.process
    assert isinstance(process, FakeProcess)
    return process


def note(started: Started, code: int, rank: int = 0, attempt: int = 0) -> None:
    """Write an error file as a rank does, at the path that torchrun gives."""
    path = started.error_files / f"run/attempt_{attempt}/{rank}/error.json"
    path.parent.mkdir(parents=True)
    write_error_file("why", code, {ERROR_FILE_VARIABLE: str(path)})


def test_run_ends_torchrun_when_a_rank_would_only_fail_again(started: Started) -> None:
    note(started, 9, rank=1)
    assert started.learner.ended(is_stopping=False) is None
    assert not process_of(started).is_terminated  # another rank was lost: torchrun's business
    note(started, 2)
    assert started.learner.ended(is_stopping=False) is None
    assert process_of(started).is_terminated
    process_of(started).code = 143
    assert started.learner.ended(is_stopping=False) == 2


def test_run_that_was_asked_to_stop_ends_well_if_its_ranks_did(started: Started) -> None:
    process_of(started).code = 143
    assert started.learner.ended(is_stopping=True) == 143
    with started.context.change() as context:
        context.state = State.DONE
    assert started.learner.ended(is_stopping=True) == 0


def test_run_that_was_asked_to_stop_fails_if_a_rank_other_than_the_first_failed_meanwhile(started: Started) -> None:
    note(started, 9, rank=1, attempt=0)  # before: torchrun has restarted all
    (started.error_files / "run/attempt_1").mkdir()
    process_of(started).code = 143
    with started.context.change() as context:
        context.state = State.DONE
    assert started.learner.ended(is_stopping=True) == 0
    note(started, 7, rank=1, attempt=1)
    assert started.learner.ended(is_stopping=True) == 7


def test_run_whose_torchrun_gave_up_does_not_start_it_again(
    started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    with started.context.change() as context:
        context.counters = {"updates": 10}
        context.update(LEARNER, pid=1, parent=FakeProcess.pid)
    assert not started.learner.schedule_restart(137, is_stopping=False)
    assert "torchrun gave up" in capsys.readouterr().err
    assert started.learner.schedule_restart(-9, is_stopping=False)  # torchrun itself was killed
    capsys.readouterr()


def test_note_is_left_only_under_torchrun_and_read_as_torchrun_reads_it(tmp_path: Path) -> None:
    write_error_file("why", 3, {})
    path = tmp_path / "run/attempt_1/0/error.json"
    path.parent.mkdir(parents=True)
    write_error_file("why", 3, {ERROR_FILE_VARIABLE: str(path)})
    told = json.loads(path.read_text())["message"]
    assert (told["message"], int(told["extraInfo"]["timestamp"]) > 0) == ("why", True)
    (tmp_path / "run/attempt_1/1").mkdir()
    (tmp_path / "run/attempt_1/1/error.json").write_text("{")  # half written
    assert failed_codes(tmp_path) == {3}
    assert failed_codes(tmp_path / "absent") == set()
    assert is_under_torchrun({"TORCHELASTIC_RUN_ID": "x"})
    assert not is_under_torchrun({})
