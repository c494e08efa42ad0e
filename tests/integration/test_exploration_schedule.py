"""Exploration of a learner that trains: epsilon follows the steps of the run, over a resume as well, and is shown."""

import io

import pytest
from rich.console import Console

from seedrl.monitoring.overview import show
from seedrl.serving.seats import POINTS
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.support import RunningLearner
from tests.integration.waiting import eventually

STEPS = 1_000_000
SETTINGS = {
    "stop__env_steps": STEPS,
    "exploration__temperature": 0.0,
    "exploration__epsilon": 1.0,
    "exploration__epsilon_end": 0.0,
    "exploration__decay": 0.02,
}


def epsilon(learner: RunningLearner) -> float:
    """Return the largest epsilon of what is trained on."""
    return learner.service.inference.sessions.exploration[1].epsilon


def planned(steps: int) -> float:
    """Return epsilon after this many steps: it changes at a thousand points of the run."""
    return max(0.0, 1 - (steps * POINTS // STEPS) / POINTS / 0.02)


def test_epsilon_follows_the_steps_of_the_run_and_continues_after_a_resume(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner(**SETTINGS)
    start_actor(learner.address)
    eventually(lambda: learner.env_steps > 3 * STEPS / POINTS and learner.service.learning.updates > 5)
    status = eventually(
        lambda: found if "exploration/epsilon" in (found := learner.service.monitor.status()).row else 0
    )
    out = io.StringIO()
    show(status, 1, Console(file=out, width=200))
    assert "exploration: temperature 0, epsilon " in out.getvalue()
    learner.stop()
    assert learner.service.learning.skipped_updates == 0

    resumed = start_learner(**SETTINGS)
    before = resumed.env_steps
    assert before > 0
    start_actor(resumed.address)
    resumed.steps_on()
    assert planned(resumed.env_steps) - 1e-6 <= epsilon(resumed) <= planned(before) + 1e-6


def test_epsilon_before_the_first_point_is_that_of_the_settings(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner(**{**SETTINGS, "stop__env_steps": 10**12, "exploration__ladder": 1.0})
    start_actor(learner.address)
    learner.steps_on()
    assert epsilon(learner) == pytest.approx(1.0)
