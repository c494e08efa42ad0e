"""Whole runs as people start them: real processes, real environments, signals and kills.

Importing torch is most of what such a process costs, so tests share runs where they can.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from safetensors.numpy import load_file

from tests.integration.processes import Commands, Process, checkpoints_of, saved_steps, summary_of
from tests.integration.waiting import eventually, free_address, is_listening

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


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("shared"))
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def run_dir(shared: Commands) -> Path:
    return shared.directory / "run"


def resume(shared: Commands, run_dir: Path) -> Process:
    """Goes on with the run until it has saved more steps than it had."""
    before = saved_steps(run_dir)
    process = shared.start("run", f"run_dir={run_dir}", *SMALL, *ENDLESS)
    eventually(lambda: saved_steps(run_dir) > before or not process.is_running)
    return process


def interrupt(process: Process, run_dir: Path, number: int) -> Ended:
    process.children()
    process.signal(number)
    return Ended(process.wait(25.0), process, summary_of(run_dir))  # C6: that is what it may take


@pytest.fixture(scope="module")
def finished(shared: Commands, run_dir: Path) -> Ended:
    process = shared.start("run", f"run_dir={run_dir}", *SMALL, "stop.env_steps=3000")
    eventually(lambda: len(process.children()) == 2 or not process.is_running)
    return Ended(process.wait(), process, summary_of(run_dir))


@pytest.fixture(scope="module")
def deserted_and_terminated(shared: Commands, run_dir: Path, finished: Ended) -> tuple[list[int], Ended]:
    """The second stage: one actor crashes, the next just leaves; once the third has taken over, SIGTERM."""
    process = resume(shared, run_dir)
    actors = []
    for number in (signal.SIGKILL, signal.SIGTERM):
        (actor,) = process.children("envs_server")
        actors.append(actor)
        os.kill(actor, number)
        eventually(lambda: not process.children("envs_server"))
        eventually(lambda: process.children("envs_server"))
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
    process = resume(shared, run_dir)
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


@pytest.mark.parametrize("stage", ["deserted_and_terminated", "damaged_and_interrupted"])
def test_run_signalled_in_mid_training_saves_and_ends_with_code_zero(
    request: pytest.FixtureRequest, stage: str
) -> None:
    _, ended = request.getfixturevalue(stage)
    assert ended.code == 0, ended.process.err
    assert ended.summary["status"] == "interrupted"
    assert "Interrupted" in ended.summary["reason"]
    assert ended.process.left_behind() == []
    assert "Traceback" not in ended.process.err


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


def test_resuming_with_other_settings_is_refused_by_key(shared: Commands, run_dir: Path, finished: Ended) -> None:
    other = ("algorithm.discount=0.5", "seed=9")
    code, _, err = shared.run("run", f"run_dir={run_dir}", *SMALL, *other)
    assert code == 3
    assert "algorithm.discount was 0.99, is 0.5" in err
    assert "seed was 1, is 9" in err
    assert err.count("\n") == 1


# Learner and actor started by hand.


def without(module: str, directory: Path) -> Path:
    """A directory for PYTHONPATH in whose presence this module cannot be imported."""
    path = directory / f"no-{module}"
    path.mkdir()
    (path / f"{module}.py").write_text(f"raise ImportError('there is no {module} on this host')\n")
    return path


def test_actor_without_torch_started_first_trains_a_learner_without_envpool(commands: Commands) -> None:
    address, run_dir = free_address(), commands.directory / "run"
    actor = commands.start("actor", f"learner={address}", path=without("torch", commands.directory))
    actor.says("trying again")
    learner = commands.start(
        "learner",
        f"listen={address}",
        f"run_dir={run_dir}",
        "stop.env_steps=2000",
        *SMALL,
        path=without("envpool", commands.directory),
    )
    assert learner.wait() == 0, learner.err
    assert actor.wait() == 0, actor.err
    assert summary_of(run_dir)["status"] == "done"
    assert summary_of(run_dir)["updates"] > 0
    assert "Done" in actor.out


def test_second_learner_on_a_port_is_refused_in_one_line_and_the_first_trains_with_an_actor_that_comes_later(
    commands: Commands,
) -> None:
    address = free_address()
    first = commands.start("learner", f"listen={address}", "run_dir=first", "stop.env_steps=2000", *SMALL)
    eventually(lambda: is_listening(address))
    code, _, err = commands.run("learner", f"listen={address}", "run_dir=second")
    assert code == 2
    assert err.count("seedrl learner: ") == 1
    assert f"cannot listen on {address}" in err
    assert "Traceback" not in err
    assert "Warning" not in err

    actor = commands.start(f"learner={address}", module="envs_server")
    assert first.wait() == 0, first.err
    assert actor.wait() == 0, actor.err
    assert summary_of(commands.directory / "first")["env_steps"] >= 2000
    assert "trying again" not in actor.out


def test_actor_without_a_learner_gives_up_with_its_own_code(commands: Commands) -> None:
    address = free_address()
    code, _, err = commands.run("actor", f"learner={address}", "patience=0.5")
    assert code == 4
    assert f"seedrl actor: no learner at {address}" in err
    assert err.count("\n") == 1


def test_actor_told_to_stop_while_it_waits_ends_with_code_zero(commands: Commands) -> None:
    actor = commands.start("actor", f"learner={free_address()}")
    actor.says("trying again")
    actor.signal(signal.SIGTERM)
    assert actor.wait() == 0


def test_run_terminated_while_its_learner_starts_ends_with_the_code_of_the_signal(commands: Commands) -> None:
    process = commands.start("run", "run_dir=run")
    eventually(lambda: process.children("learner") and process.children("envs_server"))
    process.signal(signal.SIGTERM)
    assert process.wait() in (0, 128 + signal.SIGTERM)  # 0 if it was ready by then
    assert process.err == ""
    assert process.left_behind() == []


# Repeating a run.


@pytest.fixture(scope="module")
def lockstep_runs(shared: Commands) -> dict[str, Path]:
    """Three lock-step runs: one and other, of two seeds, by a sweep; and one again."""
    settings = ("lockstep=true", "stop.env_steps=1500", *SMALL)
    sweep = shared.start("run", "-m", "seed=3,4", *settings)
    again = shared.start("run", "seed=3", "run_dir=again", *settings)
    for process in (sweep, again):
        assert process.wait() == 0, process.err
    swept = {summary_of(path)["seed"]: path for path in shared.directory.glob("runs/CartPole-v1/*")}
    return {"one": swept[3], "again": shared.directory / "again", "other": swept[4]}


def test_multirun_trains_each_combination_in_a_directory_of_its_own(lockstep_runs: dict[str, Path]) -> None:
    assert len({lockstep_runs["one"], lockstep_runs["other"]}) == 2
    assert summary_of(lockstep_runs["one"])["status"] == "done"
    assert summary_of(lockstep_runs["other"])["status"] == "done"


def final_tensors(run_dir: Path) -> dict[str, bytes]:
    tensors = load_file(checkpoints_of(run_dir)[-1] / "tensors.safetensors")
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


def counters(run_dir: Path) -> dict[str, Any]:
    timed = ("seconds", "steps_per_second", "learner_wait_fraction", "seconds_by_stage")
    return {name: value for name, value in summary_of(run_dir).items() if name not in timed}


def test_lockstep_run_with_the_same_seed_repeats_bit_for_bit(lockstep_runs: dict[str, Path]) -> None:
    assert final_tensors(lockstep_runs["one"]) == final_tensors(lockstep_runs["again"])
    assert counters(lockstep_runs["one"]) == counters(lockstep_runs["again"])
    assert summary_of(lockstep_runs["one"])["updates"] > 0


def test_lockstep_run_with_another_seed_differs(lockstep_runs: dict[str, Path]) -> None:
    one, other = final_tensors(lockstep_runs["one"]), final_tensors(lockstep_runs["other"])
    assert one.keys() == other.keys()
    assert [name for name in one if name.startswith("model/") and one[name] == other[name]] == []


# Things that cannot work.


def test_run_of_an_unknown_environment_suggests_others_and_ends(commands: Commands) -> None:
    process = commands.start("run", "env.id=CartPol-v1", "run_dir=run")
    eventually(lambda: len(process.children()) == 2 or not process.is_running)
    assert process.wait() == 2
    assert "env.id='CartPol-v1' is not an envpool environment; did you mean CartPole-v1" in process.err
    assert process.err.count("\n") == 1
    assert process.left_behind() == []


MODELS = """
import pathlib, time
from torch import nn

class Broken(nn.Module):
    core_size = 0

    def __init__(self, spec):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, inputs, core_state):
        raise ArithmeticError("no such luck")

class Stuck(Broken):
    def forward(self, inputs, core_state):
        pathlib.Path("stuck").touch()
        time.sleep(600)
"""


def test_run_that_loses_a_thread_ends_with_code_seven_and_says_why_in_one_line(commands: Commands) -> None:
    (commands.directory / "own_models.py").write_text(MODELS)
    process = commands.start("run", "model.name=own_models:Broken", "run_dir=run", *SMALL, path=commands.directory)
    eventually(lambda: len(process.children()) == 2 or not process.is_running)
    assert process.wait() == 7
    assert process.err == "seedrl learner: thread server died: ArithmeticError('no such luck')\n"
    assert process.left_behind() == []
    assert summary_of(commands.directory / "run")["status"] == "failed"


def test_second_signal_ends_a_run_that_is_stuck_at_once(commands: Commands) -> None:
    (commands.directory / "own_models.py").write_text(MODELS)
    address = free_address()
    settings = ("model.name=own_models:Stuck", f"listen={address}", "run_dir=run", *SMALL)
    process = commands.start("run", *settings, path=commands.directory)
    eventually(lambda: (commands.directory / "stuck").exists() or not process.is_running)
    assert process.children().keys()
    process.signal(signal.SIGINT)
    process.says("once more to end at once")  # the first one has arrived
    process.signal(signal.SIGINT)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert process.left_behind() == []
