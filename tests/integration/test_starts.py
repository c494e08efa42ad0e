"""Whole runs that start side by side in a sweep, and runs that cannot start."""

import csv
import shlex
from pathlib import Path

import pytest

from tests.integration.processes import Commands, summary_of

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]

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


def test_documented_sweep_by_optuna_runs_its_trials_and_can_be_extended(commands: Commands) -> None:
    pytest.importorskip("optuna", reason="pip install 'seedrl[optuna]'")
    [line] = [line for line in (ROOT / "docs/command-line.md").read_text().splitlines() if "sweep.trials=20 " in line]
    documented = [word for word in shlex.split(line)[1:] if not word.startswith("sweep.")]
    for trials in (2, 3):
        code, out, err = commands.run(*documented, *SMALL, "sweep.dir=sweep", f"sweep.trials={trials}")
        assert code == 0, out + err
        rows = rows_of(commands.directory / "sweep")
        assert [row["status"] for row in rows] == ["done"] * trials
    rates = {float(row["overrides"].split()[0].partition("=")[2]) for row in rows}
    assert len(rates) == 3
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("env.id=NoSuchEnvironment-v9",), "NoSuchEnvironment-v9"),
        (("model.name=resnet",), "model.name=resnet is none of"),
        (("init_from=nowhere",), "init_from=nowhere must be a run directory or a checkpoint"),
        (("listen=203.0.113.7:50051", "security.allow_insecure=true"), "203.0.113.7 is not an address of this machine"),
    ],
)
def test_run_that_could_not_start_says_why_and_leaves_no_directory(
    commands: Commands, settings: tuple[str, ...], words: str
) -> None:
    code, out, err = commands.run("run", *settings, *SMALL)
    assert code == 2, out + err
    assert words in err
    assert "Traceback" not in err
    assert not (commands.directory / "runs").exists() or not list((commands.directory / "runs").rglob("*"))
