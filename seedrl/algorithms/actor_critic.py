"""The parts that losses with a policy and a value share. Knows nothing of what targets are made from."""

import torch
from torch import Tensor, nn

from seedrl.algorithms.base import Loss
from seedrl.models.base import popart_of

TINY = 1e-8


def normalized(advantage: Tensor, weight: Tensor) -> Tensor:
    """Return advantages with weighted mean 0 and deviation 1, whatever the scale of rewards is."""
    share = weight / weight.sum().clamp(min=TINY)
    distance = advantage - (share * advantage).sum()
    return distance / ((share * distance.square()).sum().sqrt() + TINY)


def actor_critic_loss(
    policy: Tensor, value: Tensor, entropy: Tensor, value_cost: float, entropy_cost: float, about: dict[str, Tensor]
) -> Loss:
    """Return the weighted sum of three terms, with a report of them and of what else is known about them."""
    report = {
        "policy_loss": policy,
        "value_loss": value,
        "entropy": entropy,
        "entropy_cost": torch.full_like(entropy, entropy_cost),
        **about,
    }
    total = policy + value_cost * value - entropy_cost * entropy
    return Loss(total, {name: value.detach() for name, value in report.items()})


def explained_variance(value: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Return the share of the targets' variance that the values explain: 1 at best, 0 for a constant."""
    share = weight / weight.sum().clamp(min=TINY)
    variance = (share * (target - (share * target).sum()).square()).sum()
    return 1 - (share * (target - value).square()).sum() / variance.clamp(min=TINY)


def target_moments(target: Tensor, weight: Tensor, centre: Tensor | float) -> dict[str, Tensor]:
    """Return the mean of targets and their mean square about a centre; in float64 and with weights that sum to 1.

    Both are needed where the mean is much larger than the deviation. A rank without transitions has zeros.
    """
    target, weight = target.double(), weight.double()
    weight = weight / weight.sum().clamp(min=torch.finfo(torch.float32).tiny)
    return {"target_mean": (weight * target).sum(), "target_square": (weight * (target - centre).square()).sum()}


class ValueScale:
    """The unit of values: the deviation of their targets if the model has a PopArt head, else 1.

    Owned by the learner thread. Targets are noted once per train batch and followed after its first gradient step, by
    what all ranks report.
    """

    def __init__(self, model: nn.Module) -> None:
        self._popart = popart_of(model)
        self._one = torch.ones((), device=next(model.parameters()).device)
        self._is_new = False
        self._moments: dict[str, Tensor] = {}

    @property
    def unit(self) -> Tensor:
        return self._popart.unit if self._popart else self._one

    def note(self, target: Tensor, weight: Tensor) -> None:
        """Note the targets of a train batch."""
        self._moments = target_moments(target, weight, self._popart.moments.mean if self._popart else 0.0)
        self._is_new = True

    def report(self) -> dict[str, Tensor]:
        """Return what `follow` needs, for the report of a loss."""
        return self._moments

    def follow(self, report: dict[str, Tensor]) -> None:
        """Measure values in units of the newest targets from now on; that changes no value."""
        if self._popart and self._is_new:
            self._popart.rescale(report["target_mean"], report["target_square"])
        self._is_new = False
