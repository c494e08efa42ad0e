"""What a policy's numbers mean: distributions of actions, for choices and amounts alike. Knows nothing of models.

A policy gives `policy_size` numbers for a row, in the order of the action's leaves: a logit for each choice; for n
amounts n means, then n logarithms of deviations. What is drawn is recorded as one array:

    a single choice    int64 []
    choices only       int64 [W], an entry for each choice
    anything else      float32 [W], an entry for each choice and each amount

Gaussian are recorded as they were drawn, where -1 … 1 stands for the bounds. `told` makes of them what the environments
get: within the bounds, by clipping, or by tanh if `squash`. So densities are those of a Gaussian, and exact.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from seedrl.specs import ActionSpec, Arrays, CategoricalSpec, ContinuousSpec, EnvSpec, as_tree

SMALLEST, LARGEST = -5.0, 2.0  # logarithms of deviations
FORBIDDEN_BELOW = -1e8  # logits of choices that a mask forbids


class Categorical:
    """`count` choices in a row, of `size` each. Their numbers are [..., count * size], their entries [..., count]."""

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self.numbers = self.noise_size = self.feature_size = count * size

    def noise(self, rows: int, generator: torch.Generator) -> Tensor:
        """Gumbel's."""
        values = torch.empty(rows, self.noise_size, device=generator.device)
        return values.exponential_(generator=generator).log_().neg_()

    def choose(self, logits: Tensor, noise: Tensor) -> Tensor:
        return self._apart(logits + noise).argmax(dim=-1)

    def explored(self, logits: Tensor, temperature: Tensor, epsilon: Tensor) -> Tensor:
        """Logits of softmax(logits / temperature), mixed with all allowed choices alike."""
        apart = self._apart(logits)
        allowed = apart > FORBIDDEN_BELOW
        log_policy = functional.log_softmax(apart / temperature.unsqueeze(-1), dim=-1)
        share = epsilon.unsqueeze(-1)
        uniform = share.log() - allowed.sum(dim=-1, keepdim=True).log()
        mixed = torch.logaddexp(torch.log1p(-share) + log_policy, uniform)
        return torch.where(allowed, mixed, apart).flatten(-2)

    def log_prob(self, logits: Tensor, action: Tensor) -> Tensor:
        log_policy = functional.log_softmax(self._apart(logits), dim=-1)
        return log_policy.gather(-1, action.long().unsqueeze(-1)).squeeze(-1).sum(dim=-1)

    def entropy(self, logits: Tensor) -> Tensor:
        log_policy = functional.log_softmax(self._apart(logits), dim=-1)
        return -(log_policy.exp() * log_policy).sum(dim=(-2, -1))

    def features(self, action: Tensor) -> Tensor:
        return functional.one_hot(action.long(), self.size).flatten(-2).float()

    def to_env(self, action: NDArray[Any]) -> NDArray[np.int32]:
        return action.astype(np.int32)

    def _apart(self, logits: Tensor) -> Tensor:
        return logits.view(*logits.shape[:-1], self.count, self.size)


class Gaussian:
    """Independent Gaussians."""

    def __init__(self, spec: ContinuousSpec, squash: bool) -> None:
        self.count = self.noise_size = self.feature_size = len(spec.low)
        self.numbers = 2 * self.count
        self._low, self._high = np.array(spec.low, np.float64), np.array(spec.high, np.float64)
        self._bounded = np.isfinite(self._low) & np.isfinite(self._high)
        low, high = np.where(self._bounded, [self._low, self._high], 0.0)
        self._middle, self._reach = (high + low) / 2, (high - low) / 2
        self._squash = squash

    def noise(self, rows: int, generator: torch.Generator) -> Tensor:
        return torch.empty(rows, self.count, device=generator.device).normal_(generator=generator)

    def choose(self, numbers: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = self._apart(numbers)
        return mean + log_std.exp() * noise

    def explored(self, numbers: Tensor, temperature: Tensor, epsilon: Tensor) -> Tensor:
        """Deviations times temperature."""
        mean, log_std = self._apart(numbers)
        return torch.cat([mean, log_std + temperature.log()], dim=-1)

    def log_prob(self, numbers: Tensor, action: Tensor) -> Tensor:
        mean, log_std = self._apart(numbers)
        distance = (action - mean) * (-log_std).exp()
        return (-0.5 * distance.square() - log_std - 0.5 * math.log(2 * math.pi)).sum(dim=-1)

    def entropy(self, numbers: Tensor) -> Tensor:
        _, log_std = self._apart(numbers)
        return (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(dim=-1)

    def features(self, action: Tensor) -> Tensor:
        return action.tanh()

    def to_env(self, action: NDArray[Any]) -> NDArray[np.float32]:
        unit = np.tanh(action) if self._squash else np.clip(action, -1, 1)
        amount = np.where(self._bounded, self._middle + self._reach * unit, action)
        return np.clip(amount, self._low, self._high).astype(np.float32)

    def _apart(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = numbers.chunk(2, dim=-1)
        return mean, log_std.clamp(SMALLEST, LARGEST)


class Actions:
    """The distribution of an environment's actions. Every method takes and gives rows with any leading axes."""

    def __init__(self, spec: EnvSpec, squash: bool = False) -> None:
        self._spec = spec
        self._parts = [part for leaf in spec.actions for part in _parts(leaf, squash)]
        self._numbers = [part.numbers for part in self._parts]
        self._entries = [part.count for part in self._parts]
        self._noise = [part.noise_size for part in self._parts]
        self.noise_size = sum(self._noise)
        self._is_plain = isinstance(spec.action, CategoricalSpec) and not spec.action.shape
        self.shape = () if self._is_plain else (sum(self._entries),)
        self.dtype = np.dtype(np.int64 if all(isinstance(part, Categorical) for part in self._parts) else np.float32)
        self.feature_size = sum(part.feature_size for part in self._parts)

    def noise(self, rows: int, generator: torch.Generator) -> Tensor:
        """What `choose` needs for so many rows; zeros instead choose the likeliest action."""
        return torch.cat([part.noise(rows, generator) for part in self._parts], dim=-1)

    def choose(self, numbers: Tensor, noise: Tensor) -> Tensor:
        """One action per row, each with the probability that its numbers stand for."""
        if self._is_plain:
            return (numbers + noise).argmax(dim=-1)
        split = zip(self._parts, self._apart(numbers), noise.split(self._noise, dim=-1), strict=True)
        return torch.cat([part.choose(own, drawn) for part, own, drawn in split], dim=-1)

    def explored(self, numbers: Tensor, temperature: Tensor, epsilon: Tensor) -> Tensor:
        """The numbers of a policy that explores more or less, [N, P]; temperature and epsilon are [N].

        Categorical have softmax(logits / temperature) with probability 1 - epsilon, and else any that is allowed, all
        alike; amounts have `temperature` times their deviation. At 1 and 0 the distribution is the same.
        """
        temperature, epsilon = temperature.unsqueeze(-1), epsilon.unsqueeze(-1)
        split = zip(self._parts, self._apart(numbers), strict=True)
        return torch.cat([part.explored(own, temperature, epsilon) for part, own in split], dim=-1)

    def log_prob(self, numbers: Tensor, action: Tensor) -> Tensor:
        action = action.unsqueeze(-1) if self._is_plain else action
        split = zip(self._parts, self._apart(numbers), action.split(self._entries, dim=-1), strict=True)
        return torch.stack([part.log_prob(own, taken) for part, own, taken in split]).sum(dim=0)

    def entropy(self, numbers: Tensor) -> Tensor:
        split = zip(self._parts, self._apart(numbers), strict=True)
        return torch.stack([part.entropy(own) for part, own in split]).sum(dim=0)

    def features(self, action: Tensor) -> Tensor:
        """An action [..., *shape] as a network can take it in, [..., feature_size]."""
        action = action.unsqueeze(-1) if self._is_plain else action
        split = zip(self._parts, action.split(self._entries, dim=-1), strict=True)
        return torch.cat([part.features(taken) for part, taken in split], dim=-1)

    def to_env(self, action: NDArray[Any]) -> Arrays:
        """Recorded actions [N, *shape] as the environments get them: the tree of an Act."""
        if self._is_plain:
            return action.astype(np.int32)
        ends = np.cumsum(self._entries)[:-1]
        told = [part.to_env(taken) for part, taken in zip(self._parts, np.split(action, ends, axis=-1), strict=True)]
        found, at = [], 0
        for leaf in self._spec.actions:
            own = len(_parts(leaf, squash=False))
            found.append(np.concatenate(told[at : at + own], axis=-1).reshape(len(action), *leaf.shape))
            at += own
        return as_tree(self._spec.action, found)

    def _apart(self, numbers: Tensor) -> tuple[Tensor, ...]:
        return numbers.split(self._numbers, dim=-1) if len(self._parts) > 1 else (numbers,)


def _parts(leaf: ActionSpec, squash: bool) -> list[Categorical | Gaussian]:
    """Categorical of equal size in a row are one part: they are drawn at once."""
    if isinstance(leaf, ContinuousSpec):
        return [Gaussian(leaf, squash)]
    runs: list[list[int]] = []
    for size in leaf.sizes:
        if runs and runs[-1][0] == size:
            runs[-1].append(size)
        else:
            runs.append([size])
    return [Categorical(len(run), run[0]) for run in runs]
