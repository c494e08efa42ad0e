"""Repeating a run: whole lock-step runs of real processes, bit for bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.integration.processes import Commands, checkpoints_of, summary_of
from tests.integration.test_processes import SMALL

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("shared"))
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def lockstep_runs(shared: Commands) -> dict[str, Path]:
    """Three lock-step runs: one and other, of two seeds, by a sweep; and one again."""
    settings = ("lockstep=true", "actors.evaluation=0.25", "stop.env_steps=1500", *SMALL)
    sweep = shared.start("run", "-m", "seed=3,4", *settings)
    again = shared.start("run", "seed=3", "run_dir=again", *settings)
    for process in (sweep, again):
        assert process.wait(110.0) == 0, process.err
    swept = {summary_of(path)["seed"]: path for path in shared.directory.glob("runs/sweeps/*/[0-9]")}
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


def test_lockstep_runs_that_are_resumed_alike_repeat_bit_for_bit(
    shared: Commands, lockstep_runs: dict[str, Path]
) -> None:
    settings = ("seed=3", "lockstep=true", "actors.evaluation=0.25", "stop.env_steps=2500", *SMALL)
    runs = [lockstep_runs["one"], lockstep_runs["again"]]
    before = final_tensors(runs[0])
    for process in [shared.start("run", f"run_dir={run}", *settings) for run in runs]:
        assert process.wait(110.0) == 0, process.err
    assert final_tensors(runs[0]) == final_tensors(runs[1]) != before


def test_lockstep_run_with_another_seed_differs(lockstep_runs: dict[str, Path]) -> None:
    one, other = final_tensors(lockstep_runs["one"]), final_tensors(lockstep_runs["other"])
    assert one.keys() == other.keys()
    assert [name for name in one if name.startswith("model/") and one[name] == other[name]] == []
