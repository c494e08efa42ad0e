"""Learner and actor started by hand, in real processes; and things that cannot work."""

import signal
from pathlib import Path

import pytest

from seedrl.run.context import ContextFile, State
from tests.integration.processes import Commands, summary_of
from tests.integration.test_processes import SMALL
from tests.integration.waiting import eventually, free_address, is_listening

pytestmark = pytest.mark.long

# Learner and actor started by hand.


def without(module: str, directory: Path) -> Path:
    """A directory for PYTHONPATH in whose presence this module cannot be imported."""
    path = directory / f"no-{module}"
    path.mkdir()
    (path / f"{module}.py").write_text(f"raise ImportError('there is no {module} on this host')\n")
    return path


def test_actor_without_torch_started_first_trains_a_learner_without_envpool(commands: Commands) -> None:
    address, run_dir = free_address(), commands.directory / "run"
    actor = commands.start("actor", f"learner={address}", path=without("torch", commands.directory))
    actor.says("trying again")
    learner = commands.start(
        "learner",
        f"listen={address}",
        f"run_dir={run_dir}",
        "stop.env_steps=2000",
        *SMALL,
        path=without("envpool", commands.directory),
    )
    assert learner.wait() == 0, learner.err
    assert actor.wait() == 0, actor.err
    assert summary_of(run_dir)["status"] == "done"
    assert summary_of(run_dir)["updates"] > 0
    assert "Done" in actor.out


def test_second_learner_on_a_port_is_refused_in_one_line_and_the_first_trains_with_an_actor_that_comes_later(
    commands: Commands,
) -> None:
    address = free_address()
    first = commands.start("learner", f"listen={address}", "run_dir=first", "stop.env_steps=2000", *SMALL)
    eventually(lambda: is_listening(address))
    code, _, err = commands.run("learner", f"listen={address}", "run_dir=second")
    assert code == 2
    assert err.count("seedrl learner: ") == 1
    assert f"cannot listen on {address}" in err
    assert "Traceback" not in err
    assert "Warning" not in err

    actor = commands.start(f"learner={address}", module="envs_server")
    assert first.wait() == 0, first.err
    assert actor.wait() == 0, actor.err
    assert summary_of(commands.directory / "first")["env_steps"] >= 2000
    assert "trying again" not in actor.out


def test_actor_without_a_learner_gives_up_with_its_own_code(commands: Commands) -> None:
    address = free_address()
    code, _, err = commands.run("actor", f"learner={address}", "patience=0.5")
    assert code == 4
    assert f"seedrl actor: no learner at {address}" in err
    assert err.count("\n") == 1


def test_actor_told_to_stop_while_it_waits_ends_with_code_zero(commands: Commands) -> None:
    actor = commands.start("actor", f"learner={free_address()}")
    actor.says("trying again")
    actor.signal(signal.SIGTERM)
    assert actor.wait() == 0


def test_run_terminated_while_its_learner_starts_ends_with_the_code_of_the_signal(commands: Commands) -> None:
    process = commands.start("run", "run_dir=run")
    eventually(lambda: process.children("learner") and process.children("envs_server"))
    process.signal(signal.SIGTERM)
    assert process.wait() in (0, 128 + signal.SIGTERM)  # 0 if it was ready by then
    assert process.err == ""
    assert process.left_behind() == []


# Things that cannot work.


def test_run_of_an_unknown_environment_suggests_others_and_ends(commands: Commands) -> None:
    process = commands.start("run", "env.id=CartPol-v1", "run_dir=run")
    eventually(lambda: len(process.children()) == 2 or not process.is_running)
    assert process.wait() == 2
    assert "env.id='CartPol-v1' is not an envpool environment; did you mean CartPole-v1" in process.err
    assert process.err.count("\n") == 2  # the run has failed, and why
    assert process.left_behind() == []
    assert not (commands.directory / "run").exists()


MODELS = """
import pathlib, time
from torch import nn
from seedrl.types import ModelOutput

class Broken(nn.Module):
    core_size = 0

    def __init__(self, spec):
        super().__init__()
        self.size = spec.policy_size
        self.layer = nn.Linear(1, 1)

    def forward(self, inputs, core_state):
        rows, batch = inputs.reward.shape
        if batch > 2:  # so not when it is checked
            raise ArithmeticError("no such luck")
        return ModelOutput(inputs.reward.new_zeros(rows, batch, self.size), inputs.reward), core_state

class Stuck(Broken):
    def forward(self, inputs, core_state):
        pathlib.Path("stuck").touch()
        time.sleep(600)
"""


ADVICE = "  look at    run/logs, or seedrl status run\n  resume     seedrl run run\n"


def test_run_that_loses_a_thread_ends_with_code_seven_and_the_traceback_on_screen_and_in_the_log(
    commands: Commands,
) -> None:
    (commands.directory / "own_models.py").write_text(MODELS)
    process = commands.start("run", "model.name=own_models:Broken", "run_dir=run", *SMALL)
    eventually(lambda: len(process.children()) == 2 or not process.is_running)
    assert process.wait() == 7
    words, _, traceback = process.err.partition("\n")
    place = "own_models.py:17 in forward"
    assert words == f"seedrl learner: {place}: thread server died: ArithmeticError('no such luck')"
    assert traceback.startswith("Traceback (most recent call last):\n")
    of_the_learner, advice = process.err[: -len(ADVICE)], process.err[-len(ADVICE) :]
    assert of_the_learner.endswith("ArithmeticError: no such luck\n")
    assert advice == ADVICE
    assert (commands.directory / "run/logs/learner.log").read_text() == of_the_learner
    assert process.left_behind() == []
    assert summary_of(commands.directory / "run")["status"] == "failed"


def test_second_signal_ends_a_run_that_is_stuck_at_once(commands: Commands) -> None:
    (commands.directory / "own_models.py").write_text(MODELS)
    address = free_address()
    settings = ("model.name=own_models:Stuck", f"listen={address}", "run_dir=run", *SMALL)
    process = commands.start("run", *settings)
    eventually(lambda: (commands.directory / "stuck").exists() or not process.is_running)
    assert process.children().keys()
    process.signal(signal.SIGINT)
    process.says("ends it at once")  # the first one has arrived
    process.signal(signal.SIGINT)
    assert process.wait(20) == 128 + signal.SIGINT
    assert process.left_behind() == []
    assert ContextFile(commands.directory / "run").read().state is State.INTERRUPTED
