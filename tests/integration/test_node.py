"""The actor for Node.js in docs/node, written from the proto alone, trains a policy with a real learner."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.processes import Commands, summary_of
from tests.integration.waiting import DEADLINE, eventually, free_address, is_listening
from tests.programs import missing

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
INSTALL_SECONDS = 120
STEPS = 2_000


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """Return a copy of docs/node with its packages, which are fetched unless they are there."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            missing(program, "nodejs npm")
    copy = shutil.copytree(ROOT / "docs/node", tmp_path / "node")
    if not (copy / "node_modules").exists():
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"]
        try:
            subprocess.run(command, cwd=copy, check=True, capture_output=True, timeout=INSTALL_SECONDS)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"the packages of docs/node cannot be fetched: {error}")
    return copy


@contextmanager
def node_actor(example: Path, address: str) -> Iterator["subprocess.Popen[str]"]:
    environment = {**os.environ, "SEEDRL_PROTO": str(ROOT / "proto/seedrl/v1/inference.proto")}
    command = ["node", "actor.mjs", address]
    with (example / "out.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=example, env=environment, stdout=out, stderr=out, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def test_node_actor_steps_its_own_environments_pauses_rejoins_and_exits_when_training_is_over(
    commands: Commands, example: Path
) -> None:
    address = free_address()
    settings = ["env=own", f"listen={address}", "run_dir=run", "actors.envs=8", "threads=1", "metrics="]
    settings += ["algorithm=impala", "algorithm.unroll_length=10", "algorithm.batch_size=8"]
    first = commands.start("learner", *settings, "stop.env_steps=1_000_000_000")
    eventually(lambda: is_listening(address) or not first.is_running)
    with node_actor(example, address) as node:
        first.says("joined with 8 environments")
        assert commands.run("control", "pause", f"learner={address}")[0] == 0
        assert commands.run("control", "resume", f"learner={address}")[0] == 0
        first.says("updates")
        first.signal(signal.SIGTERM)  # DRAIN: the actor waits for the next learner
        assert first.wait() == 0, first.err
        trained = summary_of(commands.directory / "run")["env_steps"]
        assert trained > 0
        second = commands.start("learner", *settings, f"stop.env_steps={trained + STEPS}")
        assert second.wait() == 0, second.err
        assert node.wait(DEADLINE) == 0, (example / "out.txt").read_text()  # END
    summary = summary_of(commands.directory / "run")
    assert summary["env_steps"] >= trained + STEPS
    assert summary["episodes"] > 10
    assert summary["return_mean_100"] > 8
