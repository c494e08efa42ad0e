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
from seedrl.launching import local
from seedrl.launching.children import CRASH_SECONDS, Child, Crashes, signal_of
from seedrl.launching.local import Supervisor, _with_a_port
from seedrl.run.context import LEARNER, ContextFile, State
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
def supervisor(tmp_path: Path) -> Supervisor:
    supervisor = Supervisor(RunConfig(run_dir=str(tmp_path / "run"), max_restarts=2), [])
    supervisor._learner = FakeLearner(LEARNER, lambda: ending_with(0))
    supervisor._learner_pids.add(LEARNER_PID)
    return supervisor


def tell(supervisor: Supervisor, pid: int = LEARNER_PID, updates: int = 10, reason: str = "") -> ContextFile:
    """As the learner's last words in its context."""
    with supervisor._context.change() as context:
        context.state, context.reason = State.FAILED, reason
        context.counters, context.resumed_at = {"updates": updates}, 5
        context.update(LEARNER, pid=pid)
        context.update("actor-0", streams_to=LEARNER, slots=16)
    return supervisor._context


@pytest.mark.parametrize(
    ("code", "is_restarted"),
    [
        *((code, True) for code in (1, 7, 8, 137, -signal.SIGKILL, -signal.SIGSEGV)),
        *((code, False) for code in (0, 2, 3, 6)),
        *((code, False) for code in (-signal.SIGTERM, 128 + signal.SIGTERM, -signal.SIGINT)),
    ],
)
def test_supervisor_restarts_a_learner_that_has_trained_unless_it_would_fail_again(
    supervisor: Supervisor, code: int, is_restarted: bool
) -> None:
    tell(supervisor)
    assert supervisor._is_worth_restarting(code) is is_restarted
    assert supervisor._learner.is_due is is_restarted


@pytest.mark.parametrize(("code", "is_restarted"), [(7, False), (1, False), (8, False), (-9, True), (137, True)])
@pytest.mark.parametrize("life", [{"updates": 5}, {"pid": 1}], ids=["did not train", "was another process"])
def test_supervisor_restarts_a_learner_without_progress_only_if_it_was_killed(
    supervisor: Supervisor, code: int, is_restarted: bool, life: dict[str, int]
) -> None:
    tell(supervisor, **life)
    assert supervisor._is_worth_restarting(code) is is_restarted


def test_supervisor_that_was_signalled_restarts_nothing(supervisor: Supervisor) -> None:
    tell(supervisor)
    supervisor._signalled_at = 1.0
    assert not supervisor._is_worth_restarting(-9)


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 3), (7, 7), (-signal.SIGKILL, 128 + signal.SIGKILL)])
def test_supervisor_that_was_signalled_ends_with_the_code_of_its_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: int
) -> None:
    """A learner that fails while it stops must not look like one that has stopped cleanly."""
    supervisor = Supervisor(RunConfig(run_dir=str(tmp_path / "run"), actors=ActorsConfig(count=0)), [])
    supervisor._learner = Child(LEARNER, lambda: ending_with(code))
    monkeypatch.setattr(supervisor, "_forward_signals", lambda: None)  # pytest keeps its own
    supervisor._signalled_at = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        supervisor.run()
    assert ended.value.code == expected


def test_supervisor_gives_up_on_a_learner_that_crashes_too_often_and_says_why(
    supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    context = tell(supervisor, reason="thread learner died")
    assert [supervisor._is_worth_restarting(7) for _ in range(3)] == [True, True, False]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        "learner ended with code 7 (thread learner died); actor-0 (16 slots) wait for it; restarting it"
    )
    reason = (
        "the learner crashed 3 times within 10 minutes, more often than max_restarts allows; last: thread learner died"
    )
    assert lines[2] == f"seedrl run: {reason}"
    supervisor._note()
    read = context.read()
    assert (read.state, read.reason) == (State.FAILED, reason)
    assert (read.members[LEARNER].exit_code, read.members[LEARNER].last_words) == (7, "thread learner died")


def test_supervisor_while_a_learner_restarts_says_so_in_the_context(supervisor: Supervisor) -> None:
    context = tell(supervisor)
    supervisor._is_worth_restarting(-9)
    supervisor._note()
    assert context.read().state is State.INIT
    assert context.read().reason == "restarting the learner: ended by SIGKILL"
    assert context.read().members[LEARNER].exit_code == -9


def test_supervisor_never_writes_into_the_context_of_a_run_that_others_hold(supervisor: Supervisor) -> None:
    """As when a second `seedrl run` in the same directory finds its learner refused."""
    context = tell(supervisor, pid=1)
    before = context.path.read_text()
    supervisor._is_worth_restarting(3)
    supervisor._note()
    assert context.path.read_text() == before


def test_supervisor_of_a_crashed_actor_says_that_it_concerns_only_its_slots(
    supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    tell(supervisor)
    supervisor._log(0).write_text("first\nEnvFailed\n")
    supervisor._consider_restart(0, Child("actor-0", lambda: ending_with(0)), 5)
    assert capsys.readouterr().err == (
        "actor 0 ended with code 5 (EnvFailed); this affects actor-0 (16 slots); restarting it\n"
    )


# More actors, or fewer.


@pytest.fixture
def following(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """Two actors of at most four, which sleep until they are ended."""
    sleeper = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    monkeypatch.setattr(local, "FOLLOW_SECONDS", 0.0)
    monkeypatch.setattr(supervisor, "_start_actor", lambda _: subprocess.Popen(sleeper, start_new_session=True))
    supervisor._config.actors.count, supervisor._config.actors.at_most = 2, 4
    for number in range(2):
        supervisor._add_actor(number)
        supervisor._log(number).touch()
    yield supervisor
    for actor in supervisor._actors.values():
        actor.kill()
        actor.end(deadline=float("inf"))


def follow(supervisor: Supervisor, desired: int, state: State = State.RUNNING, pid: int = LEARNER_PID) -> list[int]:
    """Which actors run after the learner has said how many it could use, once the ended ones are gone."""
    with supervisor._context.change() as context:
        context.state, context.desired_actors = state, desired
        context.update(LEARNER, pid=pid)
    supervisor._follow_demand()
    for number in supervisor._released:
        supervisor._log(number).touch()
        process = supervisor._actors[number].process
        assert process is not None
        code = process.wait()
        if supervisor._actors[number].ended() is not None:
            supervisor._consider_restart(number, supervisor._actors[number], code)
    return [number for number, actor in supervisor._actors.items() if actor.is_running]


def test_supervisor_follows_what_the_learner_could_use_within_bounds(
    following: Supervisor, capsys: pytest.CaptureFixture[str]
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
    assert following._actor_crashes.count == 0


@pytest.mark.parametrize(
    "untold", [{"state": State.INIT}, {"state": State.DRAINING}, {"pid": 1}], ids=["restarts", "ends", "is another's"]
)
def test_supervisor_changes_nothing_while_no_learner_of_its_own_trains(
    following: Supervisor, untold: dict[str, Any]
) -> None:
    assert follow(following, 3) == [0, 1, 2]
    assert follow(following, 4, **untold) == [0, 1, 2]
    assert follow(following, 1, **untold) == [0, 1, 2]


def test_supervisor_without_at_most_keeps_its_count(following: Supervisor) -> None:
    following._config.actors.at_most = 0
    assert follow(following, 9) == [0, 1]


def test_supervisor_actor_that_crashed_and_is_of_no_use_is_not_restarted(following: Supervisor) -> None:
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
    following: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = [sys.executable, "-S", "-c", "import signal; signal.signal(15, 1); print(flush=True); signal.pause()"]
    process = subprocess.Popen(stubborn, start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()  # from now on it ignores SIGTERM
    following._actors[2] = Child("actor-2", lambda: process)
    following._actors[2].start()
    following._wanted_actors = lambda: 2  # type: ignore[method-assign]
    following._follow_demand()
    following._wanted_actors = lambda: 3  # type: ignore[method-assign]
    following._follow_demand()
    assert 3 in following._actors, "the number of one that is still leaving was used again"
    assert process.poll() is None
    following._released[2] = 0.0
    following._follow_demand()
    assert process.wait() == -signal.SIGKILL


def test_supervisor_port_zero_becomes_one_that_stays() -> None:
    host, _, port = _with_a_port("127.0.0.1:0").rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    assert _with_a_port("127.0.0.1:50051") == "127.0.0.1:50051"
    assert _with_a_port("") == ""
