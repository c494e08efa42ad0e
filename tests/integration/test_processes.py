"""Whole runs as people start them: real processes, real environments, signals and kills.

Importing torch is most of what such a process costs, so tests share runs where they can.
"""

import os
import shlex
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from seedrl.launching.overrides import override
from seedrl.run.context import ContextFile, State
from tests.integration.processes import Commands, Process, checkpoints_of, saved_steps, summary_of
from tests.integration.waiting import eventually

pytestmark = pytest.mark.long

SMALL = ("actors.envs=16", "algorithm.batch_size=8", "algorithm.unroll_length=10", "stop.return_mean_100=null")
ENDLESS = ("stop.env_steps=1_000_000_000", "checkpoint.seconds=0.1")
SUMMARY_KEYS = {
    *("status", "env", "env_steps", "frames", "updates", "episodes", "seconds", "steps_per_second"),
    *("return_mean_100", "policy_lag_mean", "learner_wait_fraction", "inference_batch_mean", "seed"),
}


# The life of one run directory: trained, resumed, interrupted, damaged, resumed. Each stage is a fixture.


class Ended(NamedTuple):
    """A run that is over."""

    code: int
    process: Process
    summary: dict[str, Any]
    seconds: float = 0.0  # from a signal to its end


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("shared"))
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def run_dir(shared: Commands) -> Path:
    return shared.directory / "it's a run"


def pasted(ended: Ended, name: str) -> list[str]:
    """Return the command of one of the closing lines of a run, as a shell reads it."""
    [line] = [line for line in ended.process.out.splitlines() if line.startswith(f"  {name} ")]
    program, *arguments = shlex.split(line.removeprefix(f"  {name} "))
    assert program == "seedrl"
    return arguments


def resume(shared: Commands, run_dir: Path, line: list[str]) -> Process:
    """Resume the run with a line of its own, and wait until it has saved more steps than it had."""
    before = saved_steps(run_dir)
    process = shared.start(*line, *ENDLESS)
    eventually(lambda: saved_steps(run_dir) > before or not process.is_running)
    return process


def interrupt(process: Process, run_dir: Path, number: int) -> Ended:
    process.children()
    began = time.monotonic()
    process.signal(number)
    code = process.wait()
    return Ended(code, process, summary_of(run_dir), time.monotonic() - began)


@pytest.fixture(scope="module")
def finished(shared: Commands, run_dir: Path) -> Ended:
    process = shared.start("run", override("run_dir", str(run_dir)), *SMALL, "stop.env_steps=3000")
    eventually(lambda: len(process.children()) == 2 or not process.is_running)
    return Ended(process.wait(), process, summary_of(run_dir))


@pytest.fixture(scope="module")
def deserted_and_terminated(shared: Commands, run_dir: Path, finished: Ended) -> tuple[list[int], Ended]:
    """The second stage: one actor crashes, the next just leaves; once the third has taken over, SIGTERM."""
    process = resume(shared, run_dir, pasted(finished, "train on"))
    actors = []
    for number in (signal.SIGKILL, signal.SIGTERM):
        (actor,) = process.children("envs_server")
        actors.append(actor)
        os.kill(actor, number)
        eventually(lambda: process.children("envs_server").keys() - set(actors))  # the next one
        before = saved_steps(run_dir)
        eventually(lambda before=before: saved_steps(run_dir) > before)
    return actors, interrupt(process, run_dir, signal.SIGTERM)


@pytest.fixture(scope="module")
def damaged_and_interrupted(
    shared: Commands, run_dir: Path, deserted_and_terminated: tuple[list[int], Ended]
) -> tuple[list[Path], Ended]:
    """The third stage: the newest checkpoint is damaged; once the run has gone on from the one before, SIGINT."""
    checkpoints = checkpoints_of(run_dir)
    tensors = checkpoints[-1] / "tensors.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    process = resume(shared, run_dir, pasted(deserted_and_terminated[1], "resume"))
    return checkpoints, interrupt(process, run_dir, signal.SIGINT)


def test_run_of_a_few_thousand_steps_ends_with_code_zero_and_a_full_summary(finished: Ended) -> None:
    assert finished.code == 0, finished.process.err
    assert finished.summary.keys() >= SUMMARY_KEYS
    assert finished.summary["status"] == "done"
    assert finished.summary["env"] == "CartPole-v1"
    assert finished.summary["env_steps"] >= 3000
    assert finished.summary["updates"] > 0
    assert finished.summary["episodes"] > 0
    assert "Done" in finished.process.out


def test_run_that_ended_leaves_no_process_and_no_error_behind(finished: Ended, run_dir: Path) -> None:
    assert finished.process.left_behind() == []
    assert finished.process.err == ""
    assert "Traceback" not in (run_dir / "logs" / "actor-0.log").read_text()


def test_actors_that_crash_or_leave_in_mid_training_are_replaced_and_training_goes_on(
    deserted_and_terminated: tuple[list[int], Ended],
) -> None:
    actors, ended = deserted_and_terminated
    assert len(set(actors)) == 2
    assert ended.process.err.count("actor 0 ended with code -9") == 1
    assert ended.process.err.count("restarting it") == 1


@pytest.mark.parametrize(
    ("stage", "name"), [("deserted_and_terminated", "SIGTERM"), ("damaged_and_interrupted", "SIGINT")]
)
def test_run_signalled_in_mid_training_saves_and_ends_with_code_zero(
    request: pytest.FixtureRequest, run_dir: Path, stage: str, name: str
) -> None:
    _, ended = request.getfixturevalue(stage)
    assert ended.code == 0, ended.process.err
    assert ended.summary["status"] == "interrupted"
    assert ended.summary["reason"] == f"Interrupted by {name}"
    assert ContextFile(run_dir).read().state is State.INTERRUPTED
    assert ended.process.left_behind() == []
    assert "Traceback" not in ended.process.err


def test_run_that_was_signalled_ends_within_25_seconds(
    deserted_and_terminated: tuple[list[int], Ended], damaged_and_interrupted: tuple[list[Path], Ended]
) -> None:
    """C6: at best, as the machine may have much else to do."""
    took = [ended.seconds for _, ended in (deserted_and_terminated, damaged_and_interrupted)]
    print(f"C6: ended after {', '.join(f'{seconds:.1f}' for seconds in took)} s")
    assert min(took) < 25.0


def test_run_that_was_signalled_has_a_checkpoint_of_its_last_step(
    run_dir: Path, damaged_and_interrupted: tuple[list[Path], Ended]
) -> None:
    assert saved_steps(run_dir) == damaged_and_interrupted[1].summary["env_steps"]


def test_resumed_run_continues_its_counters(finished: Ended, deserted_and_terminated: tuple[list[int], Ended]) -> None:
    before, after = finished.summary, deserted_and_terminated[1].summary
    out = deserted_and_terminated[1].process.out
    assert f"resumed at {before['env_steps']:,} steps, {before['updates']:,} updates" in out
    for name in ("env_steps", "seconds", "updates"):  # a checkpoint was awaited, and each has an update before it
        assert after[name] > before[name]
    assert after["episodes"] >= before["episodes"]  # it may have been stopped before the next one


def test_damaged_newest_checkpoint_is_reported_and_the_one_before_is_used(
    damaged_and_interrupted: tuple[list[Path], Ended],
) -> None:
    checkpoints, ended = damaged_and_interrupted
    assert f"{checkpoints[-1]} is damaged" in ended.process.out
    assert f"resumed at {int(checkpoints[-2].name):,} steps" in ended.process.out


def test_resuming_a_run_that_is_done_changes_nothing(commands: Commands) -> None:
    """Neither its speed nor the command on its card; the second start says where it is, and nothing else."""
    kept = ("summary.json", "card.md", "config.yaml", "metrics.jsonl")
    contents = []
    for words in (("run_dir=done", *SMALL, "stop.env_steps=1000", "display=none"), ("done",)):
        assert commands.run("run", *words) == (0, "learner: run directory done\n", "")
        contents.append([(commands.directory / "done" / name).read_text() for name in kept])
    assert contents[0] == contents[1]


def test_resuming_with_other_settings_is_refused_by_key(shared: Commands, run_dir: Path, finished: Ended) -> None:
    other = ("algorithm.discount=0.5", "seed=9")
    code, _, err = shared.run("run", str(run_dir), *SMALL, *other)
    assert code == 3
    assert "algorithm.discount was 0.99, is 0.5" in err
    assert "seed was 1, is 9" in err
    assert err.count("\n") == 1
