"""Environments that fail in actor processes: made anew, restarted, or given up with a code of their own."""

import os
from pathlib import Path

from tests.integration.conftest import StartLearner
from tests.integration.processes import Commands, summary_of
from tests.integration.waiting import eventually

ROOT = Path(__file__).parents[2]
FAILING = """
import os, pathlib
from envs_server import mock

class Failing(mock.MockPool):
    calls = 0

    def recv(self):
        self.calls += 1
        if self.calls == 50:
            {fail}
        return super().recv()

mock.MockPool = Failing
"""


def failing(commands: Commands, fail: str) -> Path:
    """What to put on PYTHONPATH for processes whose mock environments fail in their 50th step."""
    (commands.directory / "sitecustomize.py").write_text(FAILING.format(fail=fail))
    return Path(f"{commands.directory}{os.pathsep}{ROOT}")


def test_environment_that_raises_again_and_again_ends_its_actor_with_code_five(
    start_learner: StartLearner, commands: Commands
) -> None:
    """A10: too many restarts end the actor, non-zero."""
    learner = start_learner(env__id="mock", model__name="mlp", metrics="")
    path = failing(commands, "raise ArithmeticError('no such luck')")
    actor = commands.start("actor", f"learner={learner.address}", "max_env_failures=1", path=path)
    assert actor.wait() == 5
    assert actor.out.count("ArithmeticError('no such luck'); making the environments anew") == 1
    assert actor.err.startswith("seedrl actor: environments failed 2 times within 10 minutes, max_env_failures allows")
    assert actor.err.count("\n") == 1
    assert learner.service.serving.actors_env_failures == 1
    eventually(lambda: not learner.service.sessions.open)


def test_environment_that_exits_takes_its_actor_along_and_another_is_started(commands: Commands) -> None:
    """A10: os._exit in a step. The learner loses the rows that were under way and nothing else."""
    fail = "pathlib.Path('exited').exists() or (pathlib.Path('exited').touch(), os._exit(9))"
    settings = ("env=mock", "model=mlp", "actors.count=1", "actors.envs=4", "stop.env_steps=2000", "metrics=")
    process = commands.start("run", "run_dir=run", *settings, path=failing(commands, fail))
    eventually(lambda: len(process.children()) == 2 or not process.is_running)
    assert process.wait() == 0, process.err
    assert "actor 0 ended with code 9" in process.err
    summary = summary_of(commands.directory / "run")
    assert summary["status"] == "done"
    assert set(summary["trouble"]) <= {"rows dropped: session_ended", "rows dropped: partial_unroll"} | {
        "unrolls dropped: session_ended"
    }
