"""Evaluation slots of a learner that trains: reported apart, kept over a resume, never trained on."""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from seedrl.roles.learner import LearnerProcess
from seedrl.specs import EnvSpec
from seedrl.types import ModelInput, ModelOutput
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.support import OracleModel
from tests.integration.waiting import eventually

TRAINED: set[int] = set()  # environments whose rows were in a train batch


class Watching(OracleModel):
    """Remembers which environments it is trained on."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__(spec)

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        if torch.is_grad_enabled():
            TRAINED.update(inputs.observation[..., 0].unique().int().tolist())
        return super().forward(inputs, core_state)


SETTINGS = {"actors__envs": 8, "actors__evaluation": 0.25, "model__name": f"{__name__}:Watching"}


def counted(service: LearnerProcess) -> tuple[int, int, int]:
    serving = service.serving
    return serving.eval_steps, serving.eval_episodes, len(serving.eval_returns)


def test_learner_with_evaluation_slots_trains_on_the_others_only_and_a_resumed_run_goes_on_counting(
    start_learner: StartLearner, start_actor: StartActor, tmp_path: Path
) -> None:
    TRAINED.clear()
    learner = start_learner(**SETTINGS)
    start_actor(learner.address)
    eventually(lambda: learner.service.serving.eval_episodes >= 120 and learner.service.learning.updates > 20)
    status = eventually(lambda: found if (found := learner.service.monitor.status()).row else None)
    summary = learner.stop()
    assert set(range(8)) - {0, 4} == TRAINED

    serving = learner.service.serving
    assert abs(serving.eval_steps * 3 - serving.env_steps) <= 8 * 4  # a quarter of all rows
    assert summary["env_steps"] == serving.env_steps
    assert summary["eval_episodes"] == serving.eval_episodes
    assert summary["eval_return_mean_100"] == serving.eval_return_mean_100 == 5.0
    assert status.row["eval_return_mean_100"] == 5.0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["eval_return_mean_100"] == 5.0
    assert np.all(np.diff([row["eval_steps"] for row in rows]) >= 0)

    before = counted(learner.service)
    resumed = start_learner(**SETTINGS)
    assert counted(resumed.service) == before
    start_actor(resumed.address)
    eventually(lambda: resumed.service.serving.eval_episodes > before[1])
