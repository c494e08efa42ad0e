"""A sweep through Hydra's submitit launcher, as on Slurm, with processes of this machine."""

import pytest

from tests.integration.processes import Commands, summary_of


@pytest.mark.cluster
def test_sweep_through_submitit_trains_each_run_in_its_directory(commands: Commands) -> None:
    small = ("actors.envs=8", "algorithm.batch_size=4", "stop.env_steps=1000", "stop.return_mean_100=null")
    sweep = ("hydra/launcher=submitit_local", "seed=1,2", "run_dir=runs/seed-${seed}")
    code, out, err = commands.run("run", "-m", *sweep, *small, "threads=1", "actors.threads=1")
    assert code == 0, out + err
    runs = [summary_of(commands.directory / f"runs/seed-{seed}") for seed in (1, 2)]
    assert [(run["seed"], run["status"]) for run in runs] == [(1, "done"), (2, "done")]
