"""The parts that losses with a policy and a value share, and their signs of trouble.

Knows nothing of what targets are made from.
"""

import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms.base import Loss
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.algorithms.signs import Sign, Signs
from seedrl.models.base import popart_of

TINY = 1e-8
LARGEST_LOG_RATIO = 20.0  # in reports, which have to stay finite
UNMOVED = 0.99  # the share of the widest entropy above which a policy has hardly changed


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
    """Return the share of the targets' variance that the values explain: 1 at best, 0 for a constant or nothing."""
    share = weight / weight.sum().clamp(min=TINY)
    variance = (share * (target - (share * target).sum()).square()).sum()
    return share.sum() - (share * (target - value).square()).sum() / variance.clamp(min=TINY)


def divergence(log_ratio: Tensor, weight: Tensor) -> Tensor:
    """Estimate the KL divergence of the old policy from the new one, by the log of new over old of actions of the old.

    Unlike the mean of -log_ratio it is never negative (Schulman 2020, "Approximating KL divergence").
    """
    log_ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO)
    return (weight * (log_ratio.exp() - 1 - log_ratio)).sum()


def clipped_share(log_ratio: Tensor, bar: float, weight: Tensor) -> Tensor:
    """Return the share of the importance weights that is cut off by clipping them at `bar`: 0 on policy, below 1."""
    ratio = weight * log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    return (ratio - weight * bar).clamp(min=0).sum() / ratio.sum().clamp(min=TINY)


def target_moments(target: Tensor, weight: Tensor, centre: Tensor | float) -> dict[str, Tensor]:
    """Return the mean of targets and their mean square about a centre; in float64 and with weights that sum to 1.

    Both are needed where the mean is much larger than the deviation. A rank without transitions has zeros.
    """
    target, weight = target.double(), weight.double()
    weight = weight / weight.sum().clamp(min=torch.finfo(torch.float32).tiny)
    return {"target_mean": (weight * target).sum(), "target_square": (weight * (target - centre).square()).sum()}


class RewardBound:
    """The largest value that rewards can add up to: the largest reward so far, in every step, discounted.

    Owned by the learner thread. Values beyond it have come from values and not from rewards.
    """

    def __init__(self, discount: float, model: nn.Module) -> None:
        self._steps = 1 / (1 - discount) if discount < 1 else 0.0  # that count in full; 0 for no bound
        self._largest = torch.zeros((), device=next(model.parameters()).device)

    @torch.no_grad()
    def share(self, reward: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """Return the mean size of targets as a share of the bound; 0 if there is none, or no reward was seen."""
        self._largest = torch.maximum(self._largest, (reward * (weight > 0)).abs().amax())
        bound = self._largest * self._steps
        size = (weight * target.abs()).sum() / weight.sum().clamp(min=TINY)
        return torch.where(bound > 0, size / bound.clamp(min=TINY), torch.zeros_like(size))


class ValueTargets:
    """The targets of values that are computed once per train batch: their unit, and what reports say of them.

    The unit is their deviation if the model has a PopArt head, else 1. It follows them after the first gradient step of
    the train batch, by what all ranks report. Owned by the learner thread.
    """

    def __init__(self, discount: float, model: nn.Module) -> None:
        self._popart = popart_of(model)
        self._bound = RewardBound(discount, model)
        self._one = torch.ones((), device=next(model.parameters()).device)
        self._is_new = False
        self._report: dict[str, Tensor] = {}

    @property
    def unit(self) -> Tensor:
        return self._popart.unit if self._popart else self._one

    @torch.no_grad()
    def note(self, *, reward: Tensor, value: Tensor, target: Tensor, weight: Tensor) -> None:
        """Note the targets of a train batch, and the values before its gradient steps; [T, B] each."""
        self._report = {
            "value_share": self._bound.share(reward, target, weight),
            "explained_variance": explained_variance(value, target, weight),
            **target_moments(target, weight, self._popart.moments.mean if self._popart else 0.0),
        }
        self._is_new = True

    def report(self) -> dict[str, Tensor]:
        """Return what people see of the targets, and what `follow` needs, for the report of a loss."""
        return self._report

    def follow(self, report: dict[str, Tensor]) -> None:
        """Measure values in units of the newest targets from now on; that changes no value."""
        if self._popart and self._is_new:
            self._popart.rescale(report["target_mean"], report["target_square"])
        self._is_new = False


def value_signs(config: AlgorithmConfig, remedy: str) -> tuple[Sign, ...]:
    """Return the signs in `value_share` and `explained_variance`; the first of them has its own remedy."""
    return (
        Sign(
            "value_share",
            "values exploding",
            "values are {value:.3g} times the most that rewards can add up to",
            remedy,
            above=2.0,
            is_urgent=True,
        ),
        Sign(
            "explained_variance",
            "values useless",
            "values explain nothing of the returns (explained variance {value:.2g})",
            f"Raise algorithm.value_cost (now {config.value_cost:g}).",
            below=0.0,
        ),
    )


def actor_critic_signs(config: AlgorithmConfig, actions: Actions, model: nn.Module, *own: Sign) -> Signs:
    """Return the signs of a policy and a value, with those that an algorithm has besides."""
    calmer = f"Lower algorithm.learning_rate (now {config.learning_rate:g})."
    exploding, useless = value_signs(config, calmer if popart_of(model) else "Set model.popart=true.")
    bolder = f"Raise algorithm.entropy_cost (now {config.entropy_cost:g})."
    gone = Sign(
        "entropy",
        "entropy gone",
        "the policy hardly explores any more (entropy {value:.2g})",
        bolder,
        below=actions.narrow_entropy,
        is_ceiling=True,
    )
    unmoved = Sign(
        "entropy",
        "policy unmoved",
        "the policy still acts at random (entropy {value:.3g})",
        f"Raise algorithm.learning_rate (now {config.learning_rate:g}).",
        above=UNMOVED * actions.wide_entropy if actions.is_discrete else float("inf"),
    )
    return Signs((exploding, gone, *own, unmoved, useless), if_flat=bolder)
