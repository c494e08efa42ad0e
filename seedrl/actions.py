"""Distributions of actions, built from the parameters that a policy outputs. Knows nothing of models.

A policy outputs `policy_size` parameters for each row, in the order of the action's leaves: the logits of each
categorical choice; for a Gaussian of n dimensions n means, then n log standard deviations. The action that is drawn is
recorded as one array:

    a single choice          int64 []
    choices only             int64 [W], one entry for each choice
    anything else            float32 [W], one entry for each choice and each dimension of a Gaussian

Gaussian actions are recorded as they were drawn, in units where -1 … 1 spans the bounds. `to_env` converts recorded
actions to what the environments take: within the bounds by clipping, or by tanh if `squash`. The recorded actions are
therefore Gaussian and their log-probabilities exact.
"""

import math
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from seedrl.specs import ActionSpec, CategoricalSpec, ContinuousSpec, EnvSpec, as_tree

MIN_LOG_STD, MAX_LOG_STD = -5.0, 2.0
NEVER = -1e9  # the log of probability 0, finite, so that zero times it is zero
FORBIDDEN_BELOW = -1e8  # logits below this are of choices that a mask forbids
NARROW_SHARE, NARROW_STD = 0.02, 0.02  # of the entropy of a uniform choice, of half the bounds: hardly any exploration

Array = TypeVar("Array", NDArray[Any], Tensor)  # numpy while serving, torch in an exported policy


class Categorical:
    """`count` choices among `size` each, side by side. Their logits are [..., count * size], actions [..., count]."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.parameter_size = self.noise_size = self.feature_size = count * size
        self.wide_entropy = count * math.log(size)
        self.narrow_entropy = NARROW_SHARE * self.wide_entropy

    def noise(self, rows: int, generator: torch.Generator) -> Tensor:
        """Draw Gumbel noise."""
        values = torch.empty(rows, self.noise_size, device=generator.device)
        return values.exponential_(generator=generator).log_().neg_()

    def choose(self, logits: Tensor, noise: Tensor) -> Tensor:
        return self._by_choice(logits + noise).argmax(dim=-1)

    def explored(self, logits: Tensor, temperature: Tensor, epsilon: Tensor) -> Tensor:
        """Return the logits of softmax(logits / temperature), mixed with a uniform choice of what is allowed."""
        by_choice = self._by_choice(logits)
        allowed = by_choice > FORBIDDEN_BELOW
        log_policy = _tempered(by_choice, temperature.unsqueeze(-1))
        share = epsilon.unsqueeze(-1)
        uniform = share.log() - allowed.sum(dim=-1, keepdim=True).log()
        mixed = torch.logaddexp(torch.log1p(-share) + log_policy, uniform)
        return torch.where(allowed, mixed, by_choice).flatten(-2)

    def log_prob(self, logits: Tensor, action: Tensor) -> Tensor:
        log_policy = functional.log_softmax(self._by_choice(logits), dim=-1)
        return log_policy.gather(-1, action.long().unsqueeze(-1)).squeeze(-1).sum(dim=-1)

    def entropy(self, logits: Tensor) -> Tensor:
        log_policy = functional.log_softmax(self._by_choice(logits), dim=-1)
        return -(log_policy.exp() * log_policy).sum(dim=(-2, -1))

    def divergence(self, logits: Tensor, other: Tensor) -> Tensor:
        log_policy, log_other = (functional.log_softmax(self._by_choice(each), dim=-1) for each in (logits, other))
        return (log_policy.exp() * (log_policy - log_other)).sum(dim=(-2, -1))

    def features(self, action: Tensor) -> Tensor:
        return functional.one_hot(action.long(), self.size).flatten(-2).float()

    def to_env(self, action: Array) -> Array:
        return _cast(action, "int32")

    def _by_choice(self, logits: Tensor) -> Tensor:
        return logits.view(*logits.shape[:-1], self.count, self.size)


class Bounds(NamedTuple):
    """The range of each dimension of a continuous action, as float64 arrays of numpy or of torch."""

    low: Any
    high: Any
    is_finite: Any  # on both sides
    middle: Any  # 0 where the range is not finite, as is `reach`
    reach: Any


class Gaussian:
    """Independent Gaussians. Their parameters are [..., 2 * count], actions [..., count]."""

    def __init__(self, spec: ContinuousSpec, squash: bool) -> None:
        self.count = self.noise_size = self.feature_size = len(spec.low)
        self.parameter_size = 2 * self.count
        self.wide_entropy = 0.5 * self.count * math.log(2 * math.pi * math.e)
        self.narrow_entropy = self.wide_entropy + self.count * math.log(NARROW_STD)
        self._squash = squash
        self._bounds = _bounds(spec)
        self.is_squashed = squash and bool(self._bounds.is_finite.all())
        self._torch_bounds = Bounds(*map(torch.from_numpy, self._bounds))

    def noise(self, rows: int, generator: torch.Generator) -> Tensor:
        return torch.empty(rows, self.count, device=generator.device).normal_(generator=generator)

    def choose(self, parameters: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = self._mean_and_log_std(parameters)
        return mean + log_std.exp() * noise

    def explored(self, parameters: Tensor, temperature: Tensor, epsilon: Tensor) -> Tensor:
        """Return the parameters with every standard deviation multiplied by the temperature."""
        mean, log_std = self._mean_and_log_std(parameters)
        return torch.cat([mean, bounded_log_std(log_std + temperature.log())], dim=-1)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        mean, log_std = self._mean_and_log_std(parameters)
        distance = (action - mean) * (-log_std).exp()
        return (-0.5 * distance.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(dim=-1)

    def squashed_log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the log of the density of tanh(action): that of the action, divided by 1 - tanh² in every dimension.

        log(1 - tanh(u)²) = 2 (log 2 - u - softplus(-2u)), which is exact however close to the bounds the action is.
        """
        log_slope = 2 * (math.log(2) - action - functional.softplus(-2 * action))
        return self.log_prob(parameters, action) - log_slope.sum(dim=-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        _, log_std = self._mean_and_log_std(parameters)
        return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(dim=-1)

    def divergence(self, parameters: Tensor, other: Tensor) -> Tensor:
        mean, log_std = self._mean_and_log_std(parameters)
        other_mean, other_log_std = self._mean_and_log_std(other)
        distance = (mean - other_mean) * (-other_log_std).exp()
        spread = (2 * (log_std - other_log_std)).exp()
        return (other_log_std - log_std + 0.5 * (spread + distance.square() - 1)).sum(dim=-1)

    def features(self, action: Tensor) -> Tensor:
        return action.tanh()

    def to_env(self, action: Array) -> Array:
        library: Any = torch if isinstance(action, Tensor) else np
        bounds = self._torch_bounds if isinstance(action, Tensor) else self._bounds
        unit = library.tanh(action) if self._squash else library.clip(action, -1, 1)
        value = library.where(bounds.is_finite, bounds.middle + bounds.reach * unit, action)
        bounded: Array = library.clip(value, bounds.low, bounds.high)
        return _cast(bounded, "float32")

    def _mean_and_log_std(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = parameters.chunk(2, dim=-1)
        return mean, bounded_log_std(log_std)


class Actions:
    """The distribution of an environment's actions. Every method takes and returns rows with any leading axes."""

    def __init__(self, spec: EnvSpec, squash: bool = False) -> None:
        self._spec = spec
        self._parts_of_leaves = [_parts(leaf, squash) for leaf in spec.actions]
        self._parts = [part for parts in self._parts_of_leaves for part in parts]
        self._parameters = [part.parameter_size for part in self._parts]
        self._entries = [part.count for part in self._parts]
        self._noise = [part.noise_size for part in self._parts]
        self.noise_size = sum(self._noise)
        self._is_single = isinstance(spec.action, CategoricalSpec) and not spec.action.shape
        self.shape = () if self._is_single else (sum(self._entries),)
        self.is_discrete = all(isinstance(part, Categorical) for part in self._parts)
        self.is_squashed = all(isinstance(part, Gaussian) and part.is_squashed for part in self._parts)
        self.dtype = np.dtype(np.int64 if self.is_discrete else np.float32)
        self.feature_size = sum(part.feature_size for part in self._parts)
        self.wide_entropy = sum(part.wide_entropy for part in self._parts)  # of uniform choices and deviations of 1
        self.narrow_entropy = sum(part.narrow_entropy for part in self._parts)  # of a policy that hardly explores

    def noise(self, rows: int, generator: torch.Generator) -> Tensor:
        """Draw the noise that `choose` needs for this many rows; with zeros it chooses the most likely action."""
        return torch.cat([part.noise(rows, generator) for part in self._parts], dim=-1)

    def choose(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """Return one action per row, drawn from the distribution with these parameters."""
        if self._is_single:
            return (parameters + noise).argmax(dim=-1)
        split = zip(self._parts, self._by_part(parameters), noise.split(self._noise, dim=-1), strict=True)
        return torch.cat([part.choose(own, drawn) for part, own, drawn in split], dim=-1)

    def explored(self, parameters: Tensor, temperature: Tensor, epsilon: Tensor) -> Tensor:
        """Return the parameters [N, P] of a policy that explores more or less; temperature and epsilon are [N].

        A choice is drawn from softmax(logits / temperature) with probability 1 - epsilon, and otherwise uniformly from
        what is allowed; a Gaussian has `temperature` times its standard deviation. At 1 and 0 nothing changes. At
        temperature 0 the softmax is the best choice alone, and a Gaussian has the least deviation that there is.
        """
        temperature, epsilon = temperature.unsqueeze(-1), epsilon.unsqueeze(-1)
        split = zip(self._parts, self._by_part(parameters), strict=True)
        return torch.cat([part.explored(own, temperature, epsilon) for part, own in split], dim=-1)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        action = action.unsqueeze(-1) if self._is_single else action
        split = zip(self._parts, self._by_part(parameters), action.split(self._entries, dim=-1), strict=True)
        return _total([part.log_prob(own, taken) for part, own, taken in split])

    def squashed_log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Return the log of the density of what `to_env` makes of actions, in units where -1 … 1 spans the bounds.

        All actions have to be continuous, bounded and squashed: `is_squashed`.
        """
        split = zip(self._parts, self._by_part(parameters), action.split(self._entries, dim=-1), strict=True)
        return _total([part.squashed_log_prob(own, taken) for part, own, taken in split if isinstance(part, Gaussian)])

    def entropy(self, parameters: Tensor) -> Tensor:
        split = zip(self._parts, self._by_part(parameters), strict=True)
        return _total([part.entropy(own) for part, own in split])

    def divergence(self, parameters: Tensor, other: Tensor) -> Tensor:
        """Return the KL divergence of another distribution from this one, KL(this ‖ other), of each row."""
        split = zip(self._parts, self._by_part(parameters), self._by_part(other), strict=True)
        return _total([part.divergence(own, theirs) for part, own, theirs in split])

    def features(self, action: Tensor) -> Tensor:
        """Encode actions [..., *shape] as inputs of a network, [..., feature_size]: one-hot, or tanh of a Gaussian."""
        action = action.unsqueeze(-1) if self._is_single else action
        split = zip(self._parts, action.split(self._entries, dim=-1), strict=True)
        return torch.cat([part.features(taken) for part, taken in split], dim=-1)

    def to_env(self, action: Array) -> Array | dict[str, Array]:
        """Convert recorded actions [N, *shape] to the tree that the environments take, each leaf [N, ...]."""
        if self._is_single:
            return _cast(action, "int32")
        found, at = [], 0
        for leaf, parts in zip(self._spec.actions, self._parts_of_leaves, strict=True):
            taken = []
            for part in parts:
                taken.append(part.to_env(action[:, at : at + part.count]))
                at += part.count
            found.append(_side_by_side(taken).reshape(-1, *leaf.shape))
        return as_tree(self._spec.action, found)

    def _by_part(self, parameters: Tensor) -> tuple[Tensor, ...]:
        return parameters.split(self._parameters, dim=-1) if len(self._parts) > 1 else (parameters,)


def _total(parts: list[Tensor]) -> Tensor:
    """Return the sum over the parts of an action, most of which have only one."""
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(dim=0)


def _tempered(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return log softmax(logits / temperature), and its limit where the temperature is 0."""
    is_greedy = temperature == 0
    log_policy = functional.log_softmax(logits / temperature.masked_fill(is_greedy, 1.0), dim=-1)
    is_best = functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).bool()
    return torch.where(is_greedy, torch.zeros_like(logits).masked_fill(~is_best, NEVER), log_policy)


def bounded_log_std(log_std: Tensor) -> Tensor:
    """Clamp log standard deviations, with gradients that lead back into the range from outside.

    The gradient of `clamp` is zero outside of its range: a weight that an entropy bonus has pushed out would stay out
    for ever. A gradient that always passes would let the bonus push without limit. So outside of the range only the
    gradients pass whose descent leads inwards. Inside, values and gradients are those of `clamp`.
    """
    if torch.is_grad_enabled() and log_std.requires_grad:
        bounded: Tensor = _InwardClamp.apply(log_std)  # type: ignore[no-untyped-call]
        return bounded
    return log_std.clamp(MIN_LOG_STD, MAX_LOG_STD)  # inference, and an exported policy: no gradient is needed


class _InwardClamp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_std: Tensor) -> Tensor:
        ctx.save_for_backward(log_std)
        return log_std.clamp(MIN_LOG_STD, MAX_LOG_STD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (log_std,) = ctx.saved_tensors
        leads_out = ((log_std > MAX_LOG_STD) & (gradient < 0)) | ((log_std < MIN_LOG_STD) & (gradient > 0))
        return gradient.masked_fill(leads_out, 0)


def _parts(leaf: ActionSpec, squash: bool) -> list[Categorical | Gaussian]:
    """Split a leaf into distributions. Consecutive choices of equal size are one of them: they are drawn at once."""
    if isinstance(leaf, ContinuousSpec):
        return [Gaussian(leaf, squash)]
    runs: list[list[int]] = []
    for size in leaf.sizes:
        if runs and runs[-1][0] == size:
            runs[-1].append(size)
        else:
            runs.append([size])
    return [Categorical(len(run), run[0]) for run in runs]


def _bounds(spec: ContinuousSpec) -> Bounds:
    low, high = np.array(spec.low, np.float64), np.array(spec.high, np.float64)
    is_finite = np.isfinite(low) & np.isfinite(high)
    finite_low, finite_high = np.where(is_finite, [low, high], 0.0)
    return Bounds(low, high, is_finite, (finite_high + finite_low) / 2, (finite_high - finite_low) / 2)


def _cast(array: Array, dtype: str) -> Array:
    return array.to(getattr(torch, dtype)) if isinstance(array, Tensor) else array.astype(dtype)


def _side_by_side(arrays: list[Array]) -> Array:
    first = arrays[0]
    if len(arrays) == 1:
        return first
    return torch.cat(arrays, dim=-1) if isinstance(first, Tensor) else np.concatenate(arrays, axis=-1)
