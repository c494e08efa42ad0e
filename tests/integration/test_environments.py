"""Environments that fail in actor processes: made anew, restarted, or given up with a code of their own."""

import os
from pathlib import Path

import pytest

from tests.integration.conftest import StartLearner
from tests.integration.processes import Commands
from tests.integration.waiting import eventually, within

ROOT = Path(__file__).parents[2]
FAILING = """
import os, pathlib
from envs_server import mock, pool

class Failing(mock.MockPool):
    calls = 0

    def recv(self):
        self.calls += 1
        if self.calls == 50:
            {fail}
        return super().recv()

pool.MockPool = Failing
"""

HANGING = """
import threading
from envs_server import mock, watchdog

def hang(*_):
    threading.Event().wait()

watchdog.MAKE_SECONDS = 1.0
mock.MockPool.{hang} = hang
"""


def failing(commands: Commands, fail: str) -> Path:
    """Return what to put on PYTHONPATH for processes whose mock environments fail in their 50th step."""
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
    assert actor.out.count("ArithmeticError('no such luck'); making new environments\nTraceback (most recent") == 1
    words, _, traceback = actor.err.partition("\n")
    assert words.startswith("seedrl actor: environments failed 2 times within 10 minutes, max_env_failures allows")
    assert "sitecustomize.py:11 in recv: the environment raised: ArithmeticError('no such luck')" in words
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert traceback.endswith("ArithmeticError: no such luck\n")
    assert learner.service.serving.actors_env_failures == 1
    eventually(lambda: not learner.service.inference.sessions.open)


def test_environment_that_exits_takes_its_actor_along_and_the_next_one_is_served(
    start_learner: StartLearner, commands: Commands
) -> None:
    """A10: os._exit in a step. tests/test_children.py has the supervisor that starts the next one."""
    learner = start_learner(env__id="mock", model__name="mlp", metrics="", serving__max_slots=4)
    path = failing(commands, "pathlib.Path('exited').exists() or (pathlib.Path('exited').touch(), os._exit(9))")
    assert commands.start("actor", f"learner={learner.address}", path=path).wait() == 9
    within(1.0, lambda: not learner.service.inference.sessions.open)
    commands.start("actor", f"learner={learner.address}", path=path)
    learner.steps_on(200)
    assert sum(learner.service.serving.sessions_refused.values()) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("hang", "words"),
    [("__init__", "the environments could not be made for 1 s"), ("send", "has not answered for 1 s")],
)
def test_environment_that_keeps_the_main_thread_ends_its_actor_with_code_five(
    start_learner: StartLearner, commands: Commands, hang: str, words: str
) -> None:
    """Nothing else brings the thread back; a supervisor starts the next actor."""
    learner = start_learner(env__id="mock", model__name="mlp", metrics="")
    (commands.directory / "sitecustomize.py").write_text(HANGING.format(hang=hang))
    path = Path(f"{commands.directory}{os.pathsep}{ROOT}")
    actor = commands.start("actor", f"learner={learner.address}", "step_deadline=1", path=path)
    assert actor.wait() == 5
    assert f"{words}; ending the process" in actor.err
    eventually(lambda: not learner.service.inference.sessions.open)
