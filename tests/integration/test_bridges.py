"""Bridges to other systems, each against the real other end, with the programs of docs/bridges.md."""

import contextlib
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import seedrl
from envs_server.gym import GymPool
from seedrl.rows import RESET, TERMINATED, TRUNCATED
from tests.counterparts import python_with_counterparts
from tests.documented import write_program
from tests.fakes import make_job
from tests.integration.processes import Commands, summary_of
from tests.integration.waiting import eventually, free_address, is_listening
from tests.trained_runs import leave_trained

DOCUMENT = "docs/bridges.md"
OPTIONS = {
    "observation": {"position": {}, "steps": {"dtype": "int32"}},
    "action": {"right": {"choices": 2}},
    "truncated": "metadata.late",
}

pytestmark = pytest.mark.long


@contextlib.contextmanager
def openenv_server(directory: Path) -> Iterator[str]:
    """Yield the address of the documented server, made with OpenEnv's own package."""
    program, address = write_program("corridor_server.py", DOCUMENT, directory), free_address()
    port = address.rpartition(":")[2]
    process = subprocess.Popen([python_with_counterparts(), str(program), port], cwd=directory)
    try:
        eventually(lambda: process.poll() is not None or is_listening(address))
        assert process.poll() is None, "the server has ended"
        yield f"ws://{address}"
    finally:
        process.terminate()
        process.wait()


def test_openenv_server_steps_as_the_environment_does(tmp_path: Path) -> None:
    """The expected rows are computed here: a corridor of five steps, and forty steps of time."""
    with openenv_server(tmp_path) as url:
        pool = GymPool(make_job(4, env_id=f"openenv:{url}", options=OPTIONS), threads=1)
        with contextlib.closing(pool):
            position, steps, flags = np.zeros(4, int), np.zeros(4, int), np.full(4, RESET)
            for _ in range(90):
                rows = pool.recv()
                assert isinstance(rows.observation, dict)
                np.testing.assert_allclose(rows.observation["position"], position / 5, rtol=1e-6)
                np.testing.assert_array_equal(rows.observation["steps"], steps)
                np.testing.assert_array_equal(rows.flags, flags)
                right = np.array([1, 1, 0, 0], np.int32)  # two arrive, two never do
                pool.send(right, rows.env_id)
                begins = (flags & (TERMINATED | TRUNCATED)) != 0
                position = np.where(begins, 0, np.maximum(0, position + np.where(right, 1, -1)))
                steps = np.where(begins, 0, steps + 1)
                ended = np.where(position == 5, TERMINATED, np.where(steps == 40, TRUNCATED, 0))
                flags = np.where(begins, RESET, ended)


def test_openpis_own_client_is_served_by_the_documented_program(tmp_path: Path, commands: Commands) -> None:
    run, address = leave_trained(tmp_path / "run"), free_address()
    server = commands.start("serve", str(run), f"websocket={address}", f"listen={free_address()}", "threads=1")
    server.says(f"ws://{address}")
    program = write_program("robot.py", DOCUMENT, tmp_path)
    robot = [python_with_counterparts(), str(program), *address.split(":")]
    done = subprocess.run(robot, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    metadata, actions = done.stdout.splitlines()
    assert metadata == str(
        {
            "env": "CartPole-v1",
            "observation": {"observation": "float32[4]"},
            "action": "2 actions",
            "action_horizon": 1,
        }
    )
    expected = seedrl.load(str(run)).act(np.zeros(4, np.float32))
    assert actions == f"[{expected}] [{expected}]"


def test_openenv_environment_is_learned_by_the_documented_commands(tmp_path: Path, commands: Commands) -> None:
    text = (Path(__file__).parents[2] / DOCUMENT).read_text()
    [check] = [line for line in text.splitlines() if line.startswith("seedrl check env.id=openenv")]
    [run] = [line for line in text.splitlines() if line.startswith("seedrl run env.id=openenv")]
    with openenv_server(tmp_path) as url:
        checked, trained = (shlex.split(line.replace("ws://127.0.0.1:8000", url))[1:] for line in (check, run))
        code, out, err = commands.run(*checked)
        assert code == 0, out + err
        code, out, err = commands.run(*trained, "run_dir=run", "display=plain", "stop.return_mean_100=0.9")
        assert code == 0, out + err
    assert summary_of(tmp_path / "run")["return_mean_100"] >= 0.9  # the best is 0.95, and chance is below 0
