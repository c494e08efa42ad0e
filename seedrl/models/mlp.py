"""Networks for vector observations, and a nearly free one for measuring."""

import math
from itertools import pairwise

from torch import Tensor, nn

from seedrl.models.base import scaled
from seedrl.specs import ArraySpec


class MlpEncoder(nn.Module):
    def __init__(self, observation: ArraySpec, sizes: list[int]) -> None:
        super().__init__()
        sizes = [math.prod(observation.shape), *sizes]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [scaled(nn.Linear(inputs, outputs)), nn.Tanh()]
        self.layers = nn.Sequential(*layers)
        self.size = sizes[-1]

    def forward(self, observation: Tensor) -> Tensor:
        features: Tensor = self.layers(observation.flatten(1).float())
        return features


class TinyEncoder(nn.Module):
    """64 entries of the observation, evenly spaced: nearly free, so that a run with it measures everything else."""

    def __init__(self, observation: ArraySpec) -> None:
        super().__init__()
        self.stride = -(-math.prod(observation.shape) // 64)
        self.size = -(-math.prod(observation.shape) // self.stride)

    def forward(self, observation: Tensor) -> Tensor:
        return observation.flatten(1)[:, :: self.stride].float().mul_(1 / 255)
