"""Processes over their restarts, and what a supervisor makes of their ends."""

import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from seedrl.config import ActorsConfig, RunConfig
from seedrl.errors import EnvBroken
from seedrl.launching import actors
from seedrl.launching.actors import ActorFleet
from seedrl.launching.children import CRASH_SECONDS, Child, Crashes, signal_of
from seedrl.launching.learner_process import LearnerProcess, _with_a_port
from seedrl.launching.local import Supervisor, run_locally
from seedrl.launching.process_notes import ProcessNotes
from seedrl.run.context import LEARNER, ContextFile, State
from seedrl.run.directory import RunDirectory
from tests.fakes import FakeClock


def test_crashes_within_the_limit_wait_longer_each_time() -> None:
    crashes = Crashes(limit=3, slowest=1.2)
    seen = []
    for _ in range(4):
        crashes.add()
        seen.append((crashes.back_off, crashes.are_too_many))
    assert seen == [(0.5, False), (1.0, False), (1.2, False), (1.2, True)]
    assert crashes.summary == "crashed 4 times within 10 minutes"


def test_crashes_of_long_ago_are_forgotten() -> None:
    clock = FakeClock()
    crashes = Crashes(limit=1, slowest=5.0, clock=clock)
    for _ in range(5):
        clock.advance(CRASH_SECONDS + 1)
        crashes.add()
    assert crashes.count == 1
    assert not crashes.are_too_many


@pytest.mark.parametrize(
    ("code", "name"), [(-9, "SIGKILL"), (137, "SIGKILL"), (-11, "SIGSEGV"), (7, ""), (0, ""), (1, ""), (255, "")]
)
def test_signal_of_exit_code(code: int, name: str) -> None:
    assert signal_of(code) == name


def ending_with(code: int) -> subprocess.Popen[bytes]:
    """Start a process that ends with this exit code, or by this signal if it is negative."""
    words = f"import os; os.kill(os.getpid(), {-code})" if code < 0 else f"raise SystemExit({code})"
    return subprocess.Popen([sys.executable, "-c", words], start_new_session=True)


def test_child_is_started_again_when_due_and_not_before() -> None:
    child = Child("actor-0", lambda: ending_with(5))
    child.start()
    assert child.process is not None
    child.process.wait()
    assert child.ended() == 5
    child.start_in(3600)
    assert child.ended() is None
    assert not child.start_if_due()
    child.start_in(0)
    assert child.start_if_due()
    assert child.starts == 2
    child.end(deadline=float("inf"))
    assert child.exit_code == 5


def test_child_that_does_not_end_is_killed() -> None:
    sleeper = [sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"]
    child = Child("actor-0", lambda: subprocess.Popen(sleeper, start_new_session=True))
    child.start()
    child.end(deadline=0.0)
    assert child.exit_code == -signal.SIGKILL


# What the supervisor decides.

LEARNER_PID = 4711


class FakeLearner(Child):
    pid = LEARNER_PID  # type: ignore[assignment]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(run_dir=str(tmp_path / "run"), max_restarts=2)


@pytest.fixture
def notes(config: RunConfig) -> ProcessNotes:
    notes = ProcessNotes(ContextFile(RunDirectory.prepare(config).path), has_torchrun=False)
    notes.learner_started(LEARNER_PID)
    return notes


@pytest.fixture
def learner(config: RunConfig, notes: ProcessNotes, tmp_path: Path) -> LearnerProcess:
    learner = LearnerProcess(config, [], Path(config.run_dir), tmp_path, notes)
    learner.child = FakeLearner(LEARNER, lambda: ending_with(0))
    return learner


@pytest.fixture
def fleet(config: RunConfig, notes: ProcessNotes) -> ActorFleet:
    return ActorFleet(config, "unix:/private/learner.sock", Path(config.run_dir) / "logs", notes)


def tell(notes: ProcessNotes, pid: int = LEARNER_PID, updates: int = 10, reason: str = "") -> ContextFile:
    """Write the last words of the learner into the context."""
    with notes.file.change() as context:
        context.state, context.reason = State.FAILED, reason
        context.counters, context.resumed_at = {"updates": updates}, 5
        context.update(LEARNER, pid=pid)
        context.update("actor-0", streams_to=LEARNER, slots=16)
    return notes.file


@pytest.mark.parametrize(
    ("code", "is_restarted"),
    [
        *((code, True) for code in (1, 7, 8, 137, -signal.SIGKILL, -signal.SIGSEGV)),
        *((code, False) for code in (0, 2, 3, 6)),
        *((code, False) for code in (-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGINT)),
    ],
)
def test_supervisor_restarts_a_learner_that_has_trained_unless_it_would_fail_again(
    learner: LearnerProcess, notes: ProcessNotes, code: int, is_restarted: bool
) -> None:
    tell(notes)
    assert learner.schedule_restart(code, is_stopping=False) is is_restarted
    assert learner.child.is_due is is_restarted


@pytest.mark.parametrize(("code", "is_restarted"), [(7, False), (1, False), (8, False), (-9, True), (137, True)])
@pytest.mark.parametrize("life", [{"updates": 5}, {"pid": 1}], ids=["did not train", "was another process"])
def test_supervisor_restarts_a_learner_without_progress_only_if_it_was_killed(
    learner: LearnerProcess, notes: ProcessNotes, code: int, is_restarted: bool, life: dict[str, int]
) -> None:
    tell(notes, **life)
    assert learner.schedule_restart(code, is_stopping=False) is is_restarted


def test_supervisor_that_was_signalled_restarts_nothing(learner: LearnerProcess, notes: ProcessNotes) -> None:
    tell(notes)
    assert not learner.schedule_restart(-9, is_stopping=True)


@pytest.mark.parametrize(
    ("code", "is_stopping", "state"),
    [
        (128 + signal.SIGINT, True, State.INTERRUPTED),  # a second Ctrl-C
        (-signal.SIGKILL, True, State.INTERRUPTED),  # it took too long after the first
        (-signal.SIGTERM, False, State.INTERRUPTED),
        (7, True, State.FAILED),
        (-signal.SIGKILL, False, State.INIT),  # it is restarted
    ],
)
def test_supervisor_calls_a_run_that_a_user_ends_at_once_interrupted(
    learner: LearnerProcess, notes: ProcessNotes, code: int, is_stopping: bool, state: State
) -> None:
    context = tell(notes)
    learner.schedule_restart(code, is_stopping)
    notes.write([learner.child])
    assert context.read().state is state


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 3), (7, 7), (-signal.SIGKILL, 128 + signal.SIGKILL)])
def test_supervisor_that_was_signalled_ends_with_the_code_of_its_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: int
) -> None:
    """A learner that fails while it stops must not look like one that has stopped cleanly."""

    def signalled(supervisor: Supervisor) -> None:
        supervisor._signalled_at = time.monotonic()

    monkeypatch.setattr(Supervisor, "_forward_signals", signalled)  # pytest keeps its own handlers
    monkeypatch.setattr(LearnerProcess, "_start", lambda _: ending_with(code))
    with pytest.raises(SystemExit) as ended:
        run_locally(RunConfig(run_dir=str(tmp_path / "run"), actors=ActorsConfig(count=0)), [])
    assert ended.value.code == expected


def test_supervisor_gives_up_on_a_learner_that_crashes_too_often_and_says_why(
    learner: LearnerProcess, notes: ProcessNotes, capsys: pytest.CaptureFixture[str]
) -> None:
    context = tell(notes, reason="thread learner died")
    assert [learner.schedule_restart(7, is_stopping=False) for _ in range(3)] == [True, True, False]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        "learner ended with code 7 (thread learner died); actor-0 (16 slots) wait for it; restarting it"
    )
    reason = (
        "the learner crashed 3 times within 10 minutes, more often than max_restarts allows; last: thread learner died"
    )
    assert lines[2] == f"seedrl run: {reason}"
    notes.write([learner.child])
    read = context.read()
    assert (read.state, read.reason) == (State.FAILED, reason)
    assert (read.members[LEARNER].exit_code, read.members[LEARNER].last_words) == (7, "thread learner died")


def test_supervisor_while_a_learner_restarts_says_so_in_the_context(
    learner: LearnerProcess, notes: ProcessNotes
) -> None:
    context = tell(notes)
    learner.schedule_restart(-9, is_stopping=False)
    notes.write([learner.child])
    assert context.read().state is State.INIT
    assert context.read().reason == "restarting the learner: ended by SIGKILL"
    assert context.read().members[LEARNER].exit_code == -9


def test_supervisor_never_writes_into_the_context_of_a_run_that_others_hold(
    learner: LearnerProcess, notes: ProcessNotes
) -> None:
    """As when a second `seedrl run` in the same directory finds its learner refused."""
    context = tell(notes, pid=1)
    before = context.path.read_text()
    learner.schedule_restart(3, is_stopping=False)
    notes.write([learner.child])
    assert context.path.read_text() == before


def test_supervisor_of_a_crashed_actor_says_that_it_concerns_only_its_slots(
    fleet: ActorFleet, notes: ProcessNotes, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(notes)
    fleet._log(0).write_text("first\nEnvFailed\n")
    fleet._consider_restart(0, Child("actor-0", lambda: ending_with(0)), 5)
    assert capsys.readouterr().err == (
        "actor 0 ended with code 5 (EnvFailed); this affects actor-0 (16 slots); restarting it\n"
    )


OUTPUT = """actor-0: joined
seedrl actor: my_env.py:3 in step: the environment raised: KeyError('a')
Traceback (most recent call last):
  File "my_env.py", line 3, in step
KeyError: 'a'
"""


def test_supervisor_of_environments_that_never_worked_ends_the_run_with_their_traceback(
    fleet: ActorFleet, notes: ProcessNotes
) -> None:
    tell(notes, updates=5)
    fleet._log(0).write_text(OUTPUT)
    with pytest.raises(EnvBroken) as raised:
        fleet._consider_restart(0, Child("actor-0", lambda: ending_with(0)), EnvBroken.exit_code)
    log = fleet._log(0)
    assert str(raised.value) == f"my_env.py:3 in step: the environment raised: KeyError('a') (actor 0, {log})"
    assert raised.value.traceback.startswith("Traceback")
    assert raised.value.traceback.endswith("KeyError: 'a'")
    assert raised.value.exit_code == 10


def test_supervisor_restarts_an_actor_whose_environments_fail_at_first_in_a_run_that_has_trained(
    fleet: ActorFleet, notes: ProcessNotes, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(notes)
    fleet._log(0).write_text(OUTPUT)
    actor = Child("actor-0", lambda: ending_with(0))
    fleet._consider_restart(0, actor, EnvBroken.exit_code)
    assert actor.is_due
    shown = capsys.readouterr().err
    assert shown.startswith("actor 0 ended with code 10 (seedrl actor: my_env.py:3 in step: ")
    assert shown.endswith("restarting it\n" + OUTPUT.partition("('a')\n")[2])


def test_last_words_of_an_actor_are_those_of_its_newest_process(fleet: ActorFleet) -> None:
    fleet._log(0).write_text(OUTPUT)
    fleet._logged[0] = len(OUTPUT)
    assert fleet._last_words(0).words == "it printed nothing"
    assert fleet._last_words(0).traceback == ""


# More actors, or fewer.


@pytest.fixture
def following(config: RunConfig, fleet: ActorFleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActorFleet]:
    """Two actors of at most four, which sleep until they are ended."""
    sleeper = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    monkeypatch.setattr(actors, "FOLLOW_SECONDS", 0.0)
    monkeypatch.setattr(fleet, "_start_actor", lambda _: subprocess.Popen(sleeper, start_new_session=True))
    config.actors.count, config.actors.at_most = 2, 4
    fleet.start()
    for number in range(2):
        fleet._log(number).touch()
    yield fleet
    for actor in fleet:
        actor.kill()
        actor.end(deadline=float("inf"))


def follow(fleet: ActorFleet, desired: int, state: State = State.RUNNING, pid: int = LEARNER_PID) -> list[int]:
    """Return the actors that run once the learner has said how many it could use and the others have ended."""
    with fleet._notes.file.change() as context:
        context.state, context.desired_actors = state, desired
        context.update(LEARNER, pid=pid)
    fleet.follow_demand(is_stopping=False)
    for number in fleet._released:
        fleet._log(number).touch()
        process = fleet._actors[number].process
        assert process is not None
        code = process.wait()
        if fleet._actors[number].ended() is not None:
            fleet._consider_restart(number, fleet._actors[number], code)
    return [number for number, actor in fleet._actors.items() if actor.is_running]


def test_supervisor_follows_what_the_learner_could_use_within_bounds(
    following: ActorFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    assert follow(following, 3) == [0, 1, 2]
    assert follow(following, 3) == [0, 1, 2]
    assert follow(following, 9) == [0, 1, 2, 3]
    assert follow(following, 1) == [0, 1]
    assert follow(following, 3) == [0, 1, 2]
    assert capsys.readouterr().err.splitlines() == [
        "the learner could use 3 actors: starting actor-2",
        "the learner could use 4 actors: starting actor-3",
        "the learner needs only 2 actors: ending actor-2, actor-3",
        "the learner could use 3 actors: starting actor-2",
    ]
    assert following._crashes.count == 0


@pytest.mark.parametrize(
    "untold", [{"state": State.INIT}, {"state": State.DRAINING}, {"pid": 1}], ids=["restarts", "ends", "is another's"]
)
def test_supervisor_changes_nothing_while_no_learner_of_its_own_trains(
    following: ActorFleet, untold: dict[str, Any]
) -> None:
    assert follow(following, 3) == [0, 1, 2]
    assert follow(following, 4, **untold) == [0, 1, 2]
    assert follow(following, 1, **untold) == [0, 1, 2]


def test_supervisor_without_at_most_keeps_its_count(config: RunConfig, following: ActorFleet) -> None:
    config.actors.at_most = 0
    assert follow(following, 9) == [0, 1]


def test_supervisor_actor_that_crashed_and_is_of_no_use_is_not_restarted(following: ActorFleet) -> None:
    follow(following, 3)
    crashed = following._actors[2]
    crashed.kill()
    assert crashed.process is not None
    crashed.process.wait()
    crashed.start_in(3600)
    assert follow(following, 2) == [0, 1]
    assert crashed._due == math.inf
    assert follow(following, 3) == [0, 1, 2]


def test_supervisor_actor_that_does_not_leave_in_time_is_killed_and_replaced_only_then(
    following: ActorFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = [sys.executable, "-S", "-c", "import signal; signal.signal(15, 1); print(flush=True); signal.pause()"]
    process = subprocess.Popen(stubborn, start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()  # from now on it ignores SIGTERM
    following._actors[2] = Child("actor-2", lambda: process)
    following._actors[2].start()
    following._wanted = lambda _: 2  # type: ignore[method-assign]
    following.follow_demand(is_stopping=False)
    following._wanted = lambda _: 3  # type: ignore[method-assign]
    following.follow_demand(is_stopping=False)
    assert 3 in following._actors, "the number of one that is still leaving was used again"
    assert process.poll() is None
    following._released[2] = 0.0
    following.follow_demand(is_stopping=False)
    assert process.wait() == -signal.SIGKILL


def test_supervisor_port_zero_becomes_one_that_stays() -> None:
    host, _, port = _with_a_port("127.0.0.1:0").rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    assert _with_a_port("127.0.0.1:50051") == "127.0.0.1:50051"
    assert _with_a_port("") == ""


@pytest.mark.parametrize(("code", "is_kept"), [(2, False), (7, True)])
def test_run_whose_settings_are_refused_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, is_kept: bool
) -> None:
    """Logs of any other failure may be needed, so its directory stays, and is named with the line that resumes it."""
    monkeypatch.setattr(Supervisor, "_forward_signals", lambda _: None)  # pytest keeps its own handlers
    monkeypatch.setattr(LearnerProcess, "_start", lambda _: ending_with(code))
    run_dir = tmp_path / "CartPole-v1" / "run"
    with pytest.raises(SystemExit):
        run_locally(RunConfig(run_dir=str(run_dir), actors=ActorsConfig(count=0)), [])
    assert run_dir.exists() is run_dir.parent.exists() is is_kept
    assert (f"resume     seedrl run {run_dir}\n" in capsys.readouterr().err) is is_kept


def test_run_whose_settings_are_refused_leaves_a_directory_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Supervisor, "_forward_signals", lambda _: None)
    monkeypatch.setattr(LearnerProcess, "_start", lambda _: ending_with(2))
    with pytest.raises(SystemExit):
        run_locally(RunConfig(run_dir=str(tmp_path), actors=ActorsConfig(count=0)), [])
    assert tmp_path.exists()
