"""Fully connected network for vector observations."""

import math
from itertools import pairwise

from torch import Tensor, nn

from seedrl.models.base import scaled
from seedrl.specs import ArraySpec


class MlpEncoder(nn.Module):
    def __init__(self, observation: ArraySpec, hidden: list[int]) -> None:
        super().__init__()
        sizes = [math.prod(observation.shape), *hidden]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(sizes):
            layers += [scaled(nn.Linear(inputs, outputs)), nn.Tanh()]
        self.layers = nn.Sequential(*layers)
        self.size = sizes[-1]

    def forward(self, observation: Tensor) -> Tensor:
        features: Tensor = self.layers(observation.flatten(1).float())
        return features
