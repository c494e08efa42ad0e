"""A learner whose policy plays against its snapshots: over real streams, and over a resume."""

import json
from pathlib import Path

import torch
from torch import Tensor

from seedrl.config import Match
from seedrl.types import ModelInput, ModelOutput
from tests.builders import same, weights
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.support import OracleModel
from tests.integration.waiting import eventually

TRAINED: set[int] = set()  # environments whose rows were in a train batch


class Watching(OracleModel):
    """Remembers which environments it is trained on."""

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        if torch.is_grad_enabled():
            TRAINED.update(inputs.observation[..., 0].unique().int().tolist())
        return super().forward(inputs, core_state)


SETTINGS = {
    "actors__envs": 8,
    "env__players": 2,
    "league__match": Match.uniform,
    "league__snapshot_updates": 5,
    "league__snapshots": 3,
    "model__name": f"{__name__}:Watching",
}


def test_learner_trains_on_its_own_seats_only_and_a_resumed_run_keeps_its_bank(
    start_learner: StartLearner, start_actor: StartActor, tmp_path: Path
) -> None:
    TRAINED.clear()
    learner = start_learner(**SETTINGS)
    start_actor(learner.address)
    eventually(lambda: learner.service.serving.games["won"] >= 50 and learner.service.learning.updates > 30)
    status = eventually(lambda: found if "elo" in (found := learner.service.monitor.status()).row else None)
    learner.stop()
    assert {0, 3, 4, 7} == TRAINED
    serving, training = learner.service.serving, learner.service.training
    assert training is not None
    assert training.league is not None
    assert abs(serving.opponent_steps - serving.env_steps) <= 8
    assert status.row["elo"] > 1000
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["games"] > 0

    before, table = training.league._bank.entries, training.league.table()
    assert 3 <= len(before) <= 5
    resumed = start_learner(**SETTINGS)
    again = eventually(lambda: resumed.service.training)
    assert again.league is not None
    kept = again.league._bank.entries[: len(before)]
    assert [entry[:3] for entry in kept] == [entry[:3] for entry in before]
    assert all(same(weights(a.model), weights(b.model)) for a, b in zip(kept, before, strict=True))
    assert again.league.table() == table
    assert resumed.service.serving.games == serving.games
    start_actor(resumed.address)
    eventually(lambda: sum(resumed.service.serving.games.values()) > sum(serving.games.values()))
