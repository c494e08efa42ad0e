"""Each bottleneck, injected into a real learner with a real stream, is the one that is named.

What is injected takes tens of milliseconds, everything else a few: the verdict does not hang on a quiet machine.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import envs_server.session
import seedrl.roles.learner
from seedrl.rows import Rows
from seedrl.status import Status
from seedrl.types import ModelInput, ModelOutput
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.support import OracleModel, RunningLearner, SignedPool, Wire
from tests.integration.waiting import eventually

WINDOW = 1.0  # seconds that a verdict covers here
SLOW = 0.03  # seconds


@pytest.fixture(autouse=True)
def _frequent_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seedrl.roles.learner, "LOOK_SECONDS", WINDOW / 10)
    monkeypatch.setattr(envs_server.session, "REPORT_SECONDS", WINDOW / 5)


class SlowInference(OracleModel):
    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        if not torch.is_grad_enabled():
            time.sleep(SLOW)
        return super().forward(inputs, core_state)


class SlowTraining(OracleModel):
    seconds = SLOW

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        if torch.is_grad_enabled():
            time.sleep(self.seconds)
        return super().forward(inputs, core_state)


class RatherSlowTraining(SlowTraining):
    seconds = 0.006


class SlowPool(SignedPool):
    seconds = SLOW

    def recv(self) -> Rows:
        time.sleep(self.seconds)
        return super().recv()


class RatherSlowPool(SlowPool):
    seconds = 0.009


def examined(learner: RunningLearner) -> Status:
    """The status once a verdict covers nothing but steady work."""
    status = learner.service.monitor.status
    eventually(lambda: status().row.get("updates", 0) >= 3 and status().verdict.bottleneck != "none")
    since = status().row["seconds"]
    eventually(lambda: status().row["seconds"] > since + 2 * WINDOW)
    return status()


CASES: dict[str, tuple[dict[str, Any], Callable[..., Any], str]] = {
    # bottleneck: settings of the learner, pool of the actor, the setting to change
    "env": ({}, SlowPool, "actors.count"),
    "batching": ({"serving__min_rows": 60, "serving__max_wait": SLOW}, SignedPool, "serving.min_rows"),
    "inference": ({"model__name": f"{__name__}:SlowInference"}, SignedPool, "model.name"),
    "learner": ({"model__name": f"{__name__}:SlowTraining"}, SignedPool, "model.name"),
    # All 64 unrolls end at once and the store takes 4: serving waits for 14 updates, then learning waits for steps.
    "store": (
        {
            "model__name": f"{__name__}:RatherSlowTraining",
            "store__capacity": 4,
            "actors__envs": 64,
            "actors__groups": 1,
        },
        RatherSlowPool,
        "store.capacity to 64",
    ),
}


@pytest.mark.parametrize("bottleneck", CASES)
def test_bottleneck_injected_is_named_with_the_setting_to_change(
    bottleneck: str, start_learner: StartLearner, start_actor: StartActor
) -> None:
    settings, pool, change = CASES[bottleneck]
    learner = start_learner(**settings)
    start_actor(learner.address, pool)
    examined(learner)
    look = learner.service.monitor.status
    # A machine that has much else to do may be a bottleneck of its own for a while.
    verdict = eventually(lambda: look().verdict.bottleneck == bottleneck and look().verdict)
    assert change in verdict.change
    assert "%" in verdict.evidence


def test_bottleneck_of_a_slow_network_is_named_with_the_setting_to_change(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    learner = start_learner()
    with Wire(learner.address, delay=SLOW) as wire:
        actor = start_actor(wire.address)
        examined(learner)
        look = learner.service.monitor.status
        verdict = eventually(lambda: look().verdict.bottleneck == "network" and look().verdict)
        actor.stop()
    assert "actors.groups" in verdict.change


def test_bottleneck_without_actors_is_none(start_learner: StartLearner, start_actor: StartActor) -> None:
    learner = start_learner()
    actor = start_actor(learner.address)
    examined(learner)
    actor.stop()
    verdict = eventually(lambda: (v := learner.service.monitor.status().verdict).bottleneck == "none" and v)
    assert "seedrl actor" in verdict.change
