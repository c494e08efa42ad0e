"""The simulator and the wrapper of docs/environments.md, word for word.

The simulator runs in a Python that has nothing but numpy, grpcio and protobuf.
"""

import importlib
import os
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest

from envs_server.pool import make_pool
from seedrl.specs import ArraySpec
from tests.documented import ROOT, write_program
from tests.fakes import make_job
from tests.integration.processes import Commands, summary_of
from tests.integration.waiting import DEADLINE, free_address

pytestmark = pytest.mark.long

ENVIRONMENTS = "docs/environments.md"
BARE = ("numpy", "grpcio", "protobuf")
HEAVY = ("torch", "envpool", "gymnasium", "hydra", "omegaconf", "prometheus_client", "rich", "yaml")
LEARNER = (
    "env=own",
    "env.options={length: 5}",
    "actors.envs=8",
    "stop.env_steps=4000",
    "algorithm=impala",
    "algorithm.batch_size=4",
)


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a fresh environment with these three packages in the versions of constraints.txt, and what they need."""
    where = tmp_path_factory.mktemp("bare")
    venv.create(where, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(where / "bin/python"), "install", "-q"]
    install = [*pip, "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"), *BARE]
    done = subprocess.run(install, capture_output=True, text=True, check=False)
    if done.returncode and not os.environ.get("CI"):
        pytest.skip(f"pip could not install {', '.join(BARE)}: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
    return where / "bin/python"


def test_bare_python_has_nothing_heavy(bare_python: Path) -> None:
    program = f"import importlib.util; print([name for name in {HEAVY} if importlib.util.find_spec(name)])"
    assert subprocess.check_output([bare_python, "-c", program], text=True) == "[]\n"


def test_documented_simulator_trains_from_a_bare_python(commands: Commands, bare_python: Path) -> None:
    path = write_program("my_simulator.py", ENVIRONMENTS, commands.directory)
    address = free_address()
    learner = commands.start(
        "learner", *LEARNER, f"listen={address}", "run_dir=run", "display=plain", "metrics=", path=ROOT
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    actor = subprocess.run(
        [bare_python, path, address], env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert actor.returncode == 0, actor.stderr
    assert "Done: " in actor.stdout
    assert learner.wait() == 0, learner.err
    summary = summary_of(commands.directory / "run")
    assert summary["updates"] >= 20
    assert summary["episodes"] >= 15


def test_actor_command_without_an_environment_is_told_what_to_do(commands: Commands) -> None:
    run = commands.start("run", *LEARNER, "run_dir=run", "display=plain", "metrics=", path=ROOT)
    assert run.wait() == 2
    assert "actors bring this environment, so `seedrl run` cannot start them" in run.err
    address = free_address()
    commands.start("learner", *LEARNER, f"listen={address}", "run_dir=run", "display=plain", "metrics=", path=ROOT)
    actor = commands.start("actor", f"learner={address}")
    assert actor.wait() == 2
    assert "its actors bring the environment, and this one has none; start it from Python as" in actor.err


def test_documented_wrapper_changes_what_travels(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_program("my_wrappers.py", ENVIRONMENTS, tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    job = make_job(2, env_id="mock", wrappers=("my_wrappers:Encoder",))
    pool = make_pool(job, threads=1)
    assert pool.spec.observation == ArraySpec((64,), "float32")
    plain = make_pool(job._replace(wrappers=()), threads=1)
    encoded, frames = pool.recv(), plain.recv()
    expected = np.tanh(frames.observation.reshape(2, -1) @ pool.weights)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(encoded.observation, expected)
    assert encoded.flags.tolist() == frames.flags.tolist()
    sys.modules.pop("my_wrappers")


def test_documented_wrapper_is_streamed_and_trained_on(commands: Commands) -> None:
    write_program("my_wrappers.py", ENVIRONMENTS, commands.directory)
    run = commands.start(
        *("run", "env=mock", "env.wrappers=[my_wrappers:Encoder]", "env.frame_stack=1", "actors.envs=8"),
        *("algorithm.batch_size=4", "stop.env_steps=800", "run_dir=run", "display=plain", "metrics="),
        path=Path(f"{commands.directory}{os.pathsep}{ROOT}"),
        OPENBLAS_NUM_THREADS="1",  # else its threads spin for rows as few as these
    )
    assert run.wait() == 0, run.err
    assert summary_of(commands.directory / "run")["updates"] >= 5
