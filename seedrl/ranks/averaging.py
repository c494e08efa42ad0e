"""How the updates of several ranks become one, or are made one every now and then. Knows nothing of losses' meaning.

Every part of a loss is a mean over the valid transitions of a rank's train batch, and ranks have different numbers of
those. Weighed by its share of them, the mean over ranks is the mean over the joined batch. So the gradients that are
averaged are those of the joined batch, and likewise the statistics of PopArt. Running statistics of observations are
linear in those of a batch, and train batches have equal numbers of rows: to average the buffers is the same. A rank
with no valid transition has no train batch: it counts for nothing in any of this, and gets what the others trained.

With `sync_every` above 1 every rank takes so many steps of its own, and then weights and buffers are averaged; of every
update only the parts of the loss are, so that all ranks skip the same ones and PopArt's units are the same everywhere.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from seedrl.learning.losses import LossParts, valid_transitions
from seedrl.ranks.group import Ranks
from seedrl.types import Unrolls

Weigh = Callable[[LossParts], LossParts]


class Averager:
    """Owned by the learner thread."""

    def __init__(self, ranks: Ranks, model: nn.Module, sync_every: int) -> None:
        self._ranks = ranks
        self._model = model
        self._world = ranks.identity.world_size
        self._sync_every = sync_every
        self._averages_gradients = not ranks.is_alone and sync_every == 1
        self._weight = torch.ones(())  # of this rank in a mean over those that have a train batch
        self._trained = torch.zeros(())  # since weights were averaged: updates with a train batch
        self.model = ranks.averaging(model) if self._averages_gradients else model  # for forward and backward

    def weigh(self, unrolls: Unrolls) -> Weigh:
        """What makes the mean over this rank's valid transitions its part of the mean over everybody's."""
        if self._ranks.is_alone:
            return lambda parts: parts
        count = valid_transitions(unrolls).sum().float()
        has_batch = (count > 0).float()
        sums = self._ranks.begin_sum(torch.stack((count, has_batch)))  # on their way during the forward pass

        def weighed(parts: LossParts) -> LossParts:
            transitions, ranks = sums().clamp(min=1)
            self._weight = has_batch * self._world / ranks
            self._trained = self._trained + has_batch
            share = count * self._world / transitions if self._averages_gradients else 1.0
            return LossParts(*(part * share for part in parts))

        return weighed

    def backward(self, loss: Tensor) -> None:
        with self._ranks.backward():
            loss.backward()

    def agree(self, parts: LossParts, grad_norm: Tensor) -> tuple[LossParts, Tensor]:
        """The same on all ranks: they take a step, or leave it out, together."""
        if self._ranks.is_alone:
            return parts, grad_norm
        numbers = torch.stack([*(part.detach() for part in parts), grad_norm])
        if self._averages_gradients:  # then the numbers are weighed, or the same everywhere
            self._average(self._buffers(), self._weight, numbers)
        else:
            self._average([numbers], self._weight)
        return LossParts(*numbers[:-1]), numbers[-1]

    def sync(self, updates: int | None = None) -> None:
        """Averages weights and buffers, after so many updates if that is due; without a number in any case."""
        if self._ranks.is_alone or self._averages_gradients:
            return
        if updates is None or updates % self._sync_every == 0:
            has_trained = (self._trained > 0).float()
            ranks = self._ranks.begin_sum(has_trained)()
            if ranks:  # else all have what they had when they last did this
                self._average([*self._model.parameters(), *self._buffers()], has_trained * self._world / ranks)
            self._trained = torch.zeros(())

    def _average(self, tensors: Sequence[Tensor], weight: Tensor, *others: Tensor) -> None:
        """Makes tensors the mean over all ranks, in place: the first ones weighed."""
        for tensor in tensors:
            tensor.detach().mul_(weight)
        self._ranks.average([*tensors, *others])

    def _buffers(self) -> list[Tensor]:
        """Those that are learned; whole numbers are counts or indices, and the same everywhere."""
        return [buffer for buffer in self._model.buffers() if buffer.is_floating_point()]
