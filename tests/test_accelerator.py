"""Runs tests/accelerator in processes of their own, as a simulated device can be registered only once and for good."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("test_budgets.py",), id="costs", marks=pytest.mark.long),
        pytest.param(
            (
                "test_parity.py",
                "test_padding.py",
                "test_graphs.py",
                "test_flight.py",
                "test_races.py",
                "test_staging.py",
                "test_updates.py",
                "test_trial.py",
            ),
            id="parity and races",
            marks=pytest.mark.long,
        ),
        pytest.param(("test_host_store.py",), id="store on the host", marks=pytest.mark.long),
    ],
)
def test_simulated_accelerator(names: tuple[str, ...]) -> None:
    paths = [str(ROOT / "tests/accelerator" / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", *paths]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SEEDRL_SIMULATED_ACCELERATOR": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
