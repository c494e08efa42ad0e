"""Running statistics of what a model sees, applied only together with a finite optimiser step. Knows no networks.

A forward pass normalises with the statistics that were there before it, and *stages* those of its batch. After the
backward pass the learner either applies them, with the optimiser step, or discards them, with a step that is skipped:

    loss = … model(…) …; loss.backward()
    ranks add up `staged_statistics(model)`
    if everything is finite:  optimizer.step(); apply_statistics(model)
    else:                     discard_statistics(model)

What is staged are sums over rows (their number, the values minus the running mean, the squares of those) in float64.
Sums are linear, so that several ranks add theirs up, weighted or not, and all of them apply the statistics of the
joined batch. Sums that are not finite are never applied; one rank's make those of all ranks not finite.

Running moments are a mean and a variance about it. E[x²] - E[x]² in float32 would lose the variance as soon as the mean
is a hundred times the deviation, and an update of the mean would be rounded away.
"""

import math
from typing import Protocol, cast

import torch
from torch import Tensor, nn

MIN_SHARE = 0.001  # of a train batch in running statistics
LARGEST = math.sqrt(torch.finfo(torch.float32).max)  # 1.8e19: larger values are taken for faults


class Statistics(Protocol):
    """A module with running statistics, such as Normalize; your own modules may be some, too."""

    staged: Tensor  # a buffer of float64 sums over rows, zero if nothing is staged; not part of a checkpoint

    def apply_staged(self) -> None:
        """Include what is staged, if it is finite; the caller clears it."""
        ...


def staged_statistics(model: nn.Module) -> list[Tensor]:
    """Return the sums that are staged; what is written to them is applied."""
    return [module.staged for module in _statistics(model)]


@torch.no_grad()
def apply_statistics(model: nn.Module) -> None:
    """Make the statistics of the batches seen since the last time part of the running ones."""
    for module in _statistics(model):
        module.apply_staged()
        module.staged.zero_()


def discard_statistics(model: nn.Module) -> None:
    """Forget the batches seen since the last time."""
    for staged in staged_statistics(model):
        staged.zero_()


def _statistics(model: nn.Module) -> list[Statistics]:
    found = [module for module in model.modules() if hasattr(type(module), "apply_staged")]
    return cast(list[Statistics], found)


def share_of(seen: Tensor) -> Tensor:
    """Return the share of the newest of `seen` train batches: all count alike, until a thousand have been seen."""
    return (1 / seen).clamp(min=MIN_SHARE)


class RunningMoments(nn.Module):
    """A running mean and the variance about it, in float64. Owned by the learner thread."""

    mean: Tensor
    variance: Tensor
    seen: Tensor

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros(()))  # train batches

    def sums(self, distance: Tensor) -> Tensor:
        """Return the sums [3, ...] over the distances [N, ...] of rows from the mean: 1, the distance, its square.

        They are not finite if a row is further away than `LARGEST`: it would outweigh all others for very many updates.
        """
        count = torch.full_like(self.mean, len(distance))
        sums = torch.stack([count, distance.sum(dim=0), distance.square().sum(dim=0)])
        return torch.where(sums[2] < LARGEST**2, sums, math.nan)

    def merge_sums(self, sums: Tensor) -> None:
        """Include a train batch by its `sums`; leave it out if they are not finite or are of no rows."""
        is_usable = sums.isfinite().all() & (sums[0] > 0).all()
        count, distance, square = torch.where(is_usable, sums, 1.0)
        self._merge(distance / count, square / count, is_usable)

    def merge(self, mean: Tensor, square: Tensor) -> None:
        """Include a train batch by its mean and by its mean square *about the running mean*, if they are finite."""
        is_usable = (mean + square).isfinite().all()
        mean, square = torch.where(is_usable, mean.double(), self.mean), torch.where(is_usable, square.double(), 0.0)
        self._merge(mean - self.mean, square, is_usable)

    def _merge(self, distance: Tensor, square: Tensor, is_usable: Tensor) -> None:
        """Mix the distributions; without a branch, so that the host does not wait for the device.

        The mixture has the mean m + s d and, about it, the variance (1 - s) v + s q - (s d)².
        """
        self.seen += is_usable
        share = torch.where(is_usable, share_of(self.seen), 0).double()
        self.variance.mul_(1 - share).add_(share * square).sub_((share * distance).square()).clamp_(min=0)
        self.mean.add_(share * distance)
