"""Combines the updates of several ranks, in every update or every few of them. Knows nothing of what a loss means.

Everything in a loss is a mean over the valid transitions of a rank's train batch, and ranks have different numbers of
those. Weighted by its share of them, the mean over ranks is the mean over the joined batch. So the gradients that are
averaged are those of the joined batch, and likewise everything the algorithm reports. Running statistics are staged as
sums (seedrl/models/statistics.py), and the average of sums makes the same statistics as their total. A rank with no
valid transition has no train batch: it counts for nothing in any of this, and gets what the others trained.

Of other buffers, such as those of your own model, the *changes* in an update are averaged. A constant has none, and
stays exactly what it is, infinite entries included.

The gradients of the model travel while the backward pass still runs. Those of the networks that an algorithm trains
besides the model follow in one message.

With `sync_every` above 1 every rank takes that many steps of its own, with statistics of its own, and then weights and
changes of buffers are averaged; in every update only the loss is, so that all ranks skip the same updates and their
values have the same units. The average of variances leaves out how far the means of the ranks are apart.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from seedrl.algorithms.base import Loss
from seedrl.learning.learner import Weigh
from seedrl.models.statistics import staged_statistics
from seedrl.ranks.group import Ranks


class RankAverager:
    """Owned by the learner thread."""

    def __init__(self, ranks: Ranks, model: nn.Module, networks: nn.Module, sync_every: int) -> None:
        """`networks` are those that are trained besides the model."""
        self._ranks = ranks
        self._networks = networks
        self._trained = nn.ModuleList([model, networks])
        self._world = ranks.identity.world_size
        self._sync_every = sync_every
        self._averages_gradients = sync_every == 1
        self._weight = torch.ones(())  # of this rank in a mean over those that have a train batch
        self._batches = torch.zeros(())  # updates with a train batch since weights were averaged
        self.model = ranks.data_parallel(model) if self._averages_gradients else model  # for forward and backward
        self._before = _copies(self._buffers())  # as they were when all ranks last had the same

    def weigh(self, valid: Callable[[], Tensor]) -> Weigh:
        if self._averages_gradients:
            self._before = _copies(self._buffers())
        count = valid().sum().float()
        has_batch = (count > 0).float()
        sums = self._ranks.begin_all_reduce_sum(torch.stack((count, has_batch)))  # travels during the forward pass

        def weighed(loss: Loss) -> Loss:
            transitions, ranks = sums().clamp(min=1)
            self._weight = has_batch * self._world / ranks
            self._batches = self._batches + has_batch
            if not self._averages_gradients:
                return loss
            share = count.double() * self._world / transitions  # moments of targets need all digits
            report = {name: value * share.to(value.dtype) for name, value in loss.report.items()}
            return loss._replace(total=loss.total * share.to(loss.total.dtype), report=report)

        return weighed

    def backward(self, total: Tensor) -> None:
        with self._ranks.backward():
            total.backward()
        if self._averages_gradients:
            self._ranks.all_reduce_mean([each.grad for each in self._networks.parameters() if each.grad is not None])

    def agree(self, loss: Loss, grad_norm: Tensor) -> tuple[Loss, Tensor]:
        numbers = torch.stack([loss.total.detach(), *loss.report.values(), grad_norm]).double()
        if self._averages_gradients:  # then the numbers are weighted already, or the same on all ranks
            self._average_with_buffers(staged_statistics(self._trained), self._weight, numbers)
        else:
            self._average([numbers], self._weight)
        total, *report, grad_norm = numbers
        return loss._replace(total=total, report=dict(zip(loss.report, report, strict=True))), grad_norm

    def sync(self, updates: int | None = None) -> None:
        if self._averages_gradients:
            return
        if updates is None or updates % self._sync_every == 0:
            has_trained = (self._batches > 0).float()
            ranks = self._ranks.begin_all_reduce_sum(has_trained)()
            if ranks:  # else all have what they had when they last did this
                self._average_with_buffers(list(self._trained.parameters()), has_trained * self._world / ranks)
                self._before = _copies(self._buffers())
            self._batches = torch.zeros(())

    def _average_with_buffers(self, tensors: Sequence[Tensor], weight: Tensor, *others: Tensor) -> None:
        """Make tensors the mean over all ranks, and change each buffer by the mean of its changes."""
        buffers = self._buffers()
        changes = [
            torch.where(now == before, 0, now - before) for now, before in zip(buffers, self._before, strict=True)
        ]
        self._average([*tensors, *changes], weight, *others)
        for buffer, before, change in zip(buffers, self._before, changes, strict=True):
            buffer.copy_(torch.where(change == 0, before, before + change))

    def _average(self, tensors: Sequence[Tensor], weight: Tensor, *others: Tensor) -> None:
        """Make tensors the mean over all ranks, in place, the first ones weighted."""
        for tensor in tensors:
            tensor.detach().mul_(weight)
        self._ranks.all_reduce_mean([*tensors, *others])

    def _buffers(self) -> list[Tensor]:
        """Return the buffers whose changes are averaged; whole numbers are counts or indices."""
        staged = {id(tensor) for tensor in staged_statistics(self._trained)}
        return [each for each in self._trained.buffers() if each.is_floating_point() and id(each) not in staged]


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]
