"""Sweeps of whole runs: the documented ones, with as few steps as they can have."""

import csv
from pathlib import Path

import pytest

from tests.integration.processes import Commands, summary_of

pytestmark = pytest.mark.long

SMALL = ("actors.envs=8", "algorithm.batch_size=4", "stop.env_steps=1500", "stop.return_mean_100=null", "threads=1")


def rows_of(directory: Path) -> list[dict[str, str]]:
    with (directory / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def test_sweep_with_a_bad_value_trains_the_others_and_can_be_plotted(commands: Commands) -> None:
    code, out, err = commands.run(
        "run", "env=cartpole", "seed=1,2", "-m", "actors.groups=2,3", "sweep.dir=sweep", "sweep.parallel=2", *SMALL
    )
    assert code == 1, out + err
    rows = rows_of(commands.directory / "sweep")
    assert [row["status"] for row in rows] == ["done", "failed", "done", "failed"]
    assert all("actors.groups=3 must divide actors.envs=8" in row["reason"] for row in rows[1::2])
    assert summary_of(commands.directory / "sweep/2")["seed"] == 2
    assert (commands.directory / "sweep/compare.png").exists()
    code, out, err = commands.run("plot", "sweep")
    assert code == 0, err
    assert "CartPole-v1" in out


def test_sweep_by_optuna_runs_its_trials_and_can_be_extended(commands: Commands) -> None:
    pytest.importorskip("optuna", reason="pip install 'seedrl[optuna]'")
    line = (
        *("run", "-m", "env=cartpole", "algorithm.learning_rate=tag(log,interval(1e-4,1e-2))"),
        *("algorithm.unroll_length=10,20", "sweep.dir=sweep", *SMALL),
    )
    for trials in (2, 3):
        code, out, err = commands.run(*line, f"sweep.trials={trials}")
        assert code == 0, out + err
        rows = rows_of(commands.directory / "sweep")
        assert [row["status"] for row in rows] == ["done"] * trials
    rates = {float(row["overrides"].split()[0].partition("=")[2]) for row in rows}
    assert len(rates) == 3
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
