"""Networks for vectors and categories, and one that costs almost nothing, for benchmarks."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from seedrl.models.base import scaled
from seedrl.models.statistics import RunningMoments
from seedrl.specs import ArraySpec

MIN_VARIANCE = 1e-6
MAX_DEVIATIONS = 10.0  # standard deviations from the mean; values beyond are clipped


class MlpEncoder(nn.Module):
    """Fully connected layers. Values enter as they are (bytes divided by 255) or normalised, categories one-hot."""

    def __init__(
        self,
        observation: ArraySpec,
        sizes: list[int],
        normalize: bool = False,
        layer_norm: bool = False,
        activation: type[nn.Module] = nn.Tanh,
    ) -> None:
        super().__init__()
        self._values = observation.values
        self._unit = 255.0 if observation.dtype == "uint8" else 1.0
        inputs = math.prod(observation.shape) * (observation.values or 1)
        self.normalize = Normalize(inputs) if normalize and not observation.values else nn.Identity()
        layers: list[nn.Module] = []
        for before, after in pairwise([inputs, *sizes]):
            norm = [nn.LayerNorm(after)] if layer_norm else []
            layers += [scaled(nn.Linear(before, after)), *norm, activation()]
        self.layers = nn.Sequential(*layers)
        self.size = sizes[-1] if sizes else inputs

    def forward(self, observation: Tensor) -> Tensor:
        rows = observation.flatten(1) if observation.dim() > 1 else observation.unsqueeze(1)
        if self._values:
            rows = functional.one_hot(rows.long(), self._values).flatten(1)
        features: Tensor = self.layers(self.normalize(rows.float() / self._unit))
        return features


class Normalize(nn.Module):
    """Normalises rows [N, size] by their running mean and standard deviation.

    Both are learned in training only, and published and saved with the weights: training sees a row as inference saw
    it with the weights of the same version.
    """

    staged: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.moments = RunningMoments(size)
        self.register_buffer("staged", torch.zeros(3, size, dtype=torch.float64), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        distance = rows.double() - self.moments.mean
        if torch.is_grad_enabled():
            self.staged += self.moments.sums(distance.detach())
        scale = self.moments.variance.clamp(min=MIN_VARIANCE).rsqrt()
        return (distance * scale).clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS).float()

    def apply_staged(self) -> None:
        self.moments.merge_sums(self.staged)


class TinyEncoder(nn.Module):
    """64 evenly spaced entries of the observation: so cheap that a run measures everything but the network."""

    def __init__(self, observation: ArraySpec) -> None:
        super().__init__()
        self.stride = -(-math.prod(observation.shape) // 64)
        self.size = -(-math.prod(observation.shape) // self.stride)

    def forward(self, observation: Tensor) -> Tensor:
        return observation.flatten(1)[:, :: self.stride].float() * (1 / 255)
