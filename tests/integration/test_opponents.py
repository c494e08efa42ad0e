"""A learner whose policy plays against its snapshots: over real streams, and over a resume."""

import json
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from envs_server.pool import make_pool
from seedrl.config import Match
from seedrl.recordings.files import load_shard
from seedrl.rows import TERMINATED
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


class LowestColumn(OracleModel):
    """Plays the first column that has room: the one who begins completes the bottom row with its tenth move."""

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        value = self.value(inputs.reward.unsqueeze(-1)).squeeze(-1)
        return ModelOutput(-100.0 * torch.arange(7.0).expand(*value.shape, 7), value), core_state


def test_loser_of_a_scripted_game_is_trained_on_its_loss_in_its_last_row(
    start_learner: StartLearner, start_actor: StartActor, tmp_path: Path
) -> None:
    """envpool's ConnectFour over a real stream, as recorded: the winner's last move is the loser's last reward."""
    learner = start_learner(
        env__id="ConnectFour-v1",
        env__players=2,
        model__name=f"{__name__}:LowestColumn",
        store__dump=str(tmp_path / "dump"),
    )
    actor = start_actor(learner.address, make_pool)
    eventually(lambda: learner.service.serving.episodes >= 40)
    actor.stop()
    learner.stop()
    shards = [load_shard(path) for path in (tmp_path / "dump" / "rank-0").glob("*.safetensors")]
    columns = ("flags", "reward", "observation.observation")
    flags, reward, board = (torch.cat([shard[name].flatten(0, 1) for shard in shards]) for name in columns)
    ended = (flags & TERMINATED) != 0
    assert reward[~ended].unique().tolist() == [0.0]
    own, other = board[ended].int().sum(dim=(1, 2)).T.tolist()  # discs on the last board, from the player's own side
    ends = Counter(zip(own, other, reward[ended].tolist(), strict=True))
    assert set(ends) == {(10, 9, 1.0), (9, 10, -1.0)}
    assert min(ends.values()) > 5
