"""Processes over their restarts, and what a supervisor makes of their ends."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from seedrl.config import RunConfig
from seedrl.context import LEARNER, ContextFile, State
from seedrl.launching.children import CRASH_SECONDS, Child, Crashes, signal_of
from seedrl.launching.local import Supervisor, _with_a_port
from tests.fakes import FakeClock


def test_crashes_within_the_limit_wait_longer_each_time() -> None:
    crashes = Crashes(limit=3, slowest=1.2)
    seen = []
    for _ in range(4):
        crashes.add()
        seen.append((crashes.back_off, crashes.are_too_many))
    assert seen == [(0.5, False), (1.0, False), (1.2, False), (1.2, True)]
    assert crashes.words == "crashed 4 times within 10 minutes"


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
    return subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"], start_new_session=True)


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


def test_supervisor_gives_up_on_a_learner_that_crashes_too_often_and_says_why(
    supervisor: Supervisor, capsys: pytest.CaptureFixture[str]
) -> None:
    context = tell(supervisor, reason="thread learner died")
    assert [supervisor._is_worth_restarting(7) for _ in range(3)] == [True, True, False]
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        "learner ended with code 7 (thread learner died); actor-0 (16 slots) wait for it; restarting it"
    )
    reason = "the learner crashed 3 times within 10 minutes, max_restarts allows no more; last: thread learner died"
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
        "actor 0 ended with code 5 (EnvFailed); that concerns actor-0 (16 slots); restarting it\n"
    )


def test_supervisor_port_zero_becomes_one_that_stays() -> None:
    host, _, port = _with_a_port("127.0.0.1:0").rpartition(":")
    assert host == "127.0.0.1"
    assert int(port) > 0
    assert _with_a_port("127.0.0.1:50051") == "127.0.0.1:50051"
    assert _with_a_port("") == ""
