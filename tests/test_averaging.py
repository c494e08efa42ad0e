"""The updates of two ranks, which are threads, become one."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seedrl.algorithms.base import Loss
from seedrl.models.mlp import Normalize
from seedrl.models.statistics import apply_statistics
from seedrl.ranks.averaging import RankAverager
from tests.thread_ranks import ThreadRanks, every

INFINITY = float("inf")


class Own(nn.Module):
    """A user's model: a constant with infinite entries, one that is no binary fraction, and a running mean."""

    infinite: Tensor
    constant: Tensor
    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("infinite", torch.tensor([0.0, -INFINITY, INFINITY]))
        self.register_buffer("constant", torch.tensor(0.1))
        self.register_buffer("running", torch.zeros(2))
        self.normalize = Normalize(2)

    def forward(self, rows: Tensor) -> Tensor:
        self.running.lerp_(rows.mean(dim=0), 0.5)
        output: Tensor = self.normalize(rows) * self.weight
        return output


def updated(rows: Sequence[Tensor], sync_every: int = 1, updates: int = 1) -> list[Own]:
    """Return the models of two ranks after some updates on these rows each; no rows are no train batch."""

    def work(ranks: ThreadRanks) -> Own:
        model, number = Own(), ranks.identity.rank
        averager = RankAverager(ranks, model, nn.Module(), sync_every)
        own = rows[number] if len(rows[number]) else torch.zeros(3, 2)
        for update in range(updates):
            weigh = averager.weigh(lambda: torch.full((len(own), 1), bool(len(rows[number]))))
            loss = weigh(Loss(averager.model(own).sum(), {}))
            loss, _ = averager.agree(loss, torch.tensor(1.0))
            assert torch.isfinite(loss.total)
            apply_statistics(model)
            averager.sync(update + 1)
        return model

    return every(2, work)


FIRST, SECOND = torch.tensor([[1.0, 10.0], [3.0, 30.0]]), torch.tensor([[5.0, 50.0], [7.0, 70.0]])
NONE = torch.zeros(0, 2)


@pytest.mark.parametrize("sync_every", [1, 2])
@pytest.mark.parametrize("second", [SECOND, NONE], ids=["both", "idle"])
def test_constant_buffers_of_a_model_stay_what_they_are(second: Tensor, sync_every: int) -> None:
    for model in updated([FIRST, second], sync_every, updates=4):
        assert model.infinite.tolist() == [0.0, -INFINITY, INFINITY]
        assert torch.equal(model.constant, torch.tensor(0.1))


@pytest.mark.parametrize("sync_every", [1, 2])
def test_buffers_that_a_model_learns_are_averaged(sync_every: int) -> None:
    models = updated([FIRST, SECOND], sync_every, updates=sync_every)
    expected = 4.0 * torch.tensor([1.0, 10.0]) * (1 - 0.5**sync_every)
    assert [model.running.tolist() for model in models] == [expected.tolist()] * 2


def test_buffers_of_a_rank_without_a_batch_are_those_of_the_other() -> None:
    models = updated([NONE, SECOND])
    assert [model.running.tolist() for model in models] == [[3.0, 30.0]] * 2
    assert [model.normalize.moments.mean.tolist() for model in models] == [[6.0, 60.0]] * 2


def test_statistics_of_ranks_are_those_of_the_joined_batch() -> None:
    """The spread between the ranks included, and for parts of different size."""
    third = torch.cat([SECOND, 1e4 + SECOND, 1e4 - FIRST])
    alone = Own()
    for _ in range(3):
        alone(torch.cat([FIRST, third]))
        apply_statistics(alone)
    for model in updated([FIRST, third], updates=3):
        for name, tensor in alone.normalize.moments.named_buffers():
            torch.testing.assert_close(dict(model.normalize.moments.named_buffers())[name], tensor)


def test_statistics_that_are_not_finite_on_one_rank_are_left_out_on_all() -> None:
    huge = torch.tensor([[1.0, 2e19], [3.0, 30.0]])
    for model in updated([FIRST, huge], updates=2):
        moments: dict[str, Any] = {name: tensor.tolist() for name, tensor in model.normalize.moments.named_buffers()}
        assert moments == {"mean": [0.0, 0.0], "variance": [1.0, 1.0], "seen": 0.0}
