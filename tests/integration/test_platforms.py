"""An actor needs nothing that only Linux has: it runs with those modules and names taken away."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.elsewhere import MODULES, NAMES
from tests.integration.conftest import StartLearner
from tests.integration.processes import Commands

ROOT = Path(__file__).parents[2]
IMPORTED = ("envs_server", "envs_server.main", "envs_server.pool", "seedrl.wire.channel", "seedrl.commandline.main")


def test_actors_modules_are_imported_without_what_only_linux_has() -> None:
    program = f"from tests.elsewhere import leave_linux; leave_linux(); import {', '.join(IMPORTED)}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_taken_away_is_there_otherwise() -> None:
    """Taking away something that does not exist would prove nothing."""
    for module, names in NAMES.items():
        assert [name for name in names.split() if not hasattr(module, name)] == []
    assert set(sys.stdlib_module_names) >= MODULES


@pytest.mark.long
def test_actor_steps_and_ends_without_what_only_linux_has(start_learner: StartLearner, commands: Commands) -> None:
    learner = start_learner(env__id="gymnasium:CartPole-v1", model__name="auto", stop__env_steps=1_000)
    actor = commands.start("actor", f"learner={learner.address}", module="tests.elsewhere", path=ROOT)
    assert actor.wait() == 0, actor.err
    assert learner.env_steps >= 1_000
    assert "Done" in actor.out
