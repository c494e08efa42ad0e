"""What an environment's observations and actions look like. Knows nothing of torch, envpool or the wire."""

import math
from dataclasses import dataclass, field

import numpy as np

# What an observation may be made of. All of them have a torch dtype of the same name.
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and numpy type name of one row."""

    shape: tuple[int, ...]
    dtype: str

    nbytes: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", math.prod(self.shape) * np.dtype(self.dtype).itemsize)

    def stacked(self, frames: int) -> "ArraySpec":
        """`frames` of these, oldest first, joined along the first axis."""
        if frames == 1:
            return self
        return ArraySpec((frames * self.shape[0], *self.shape[1:]), self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """One environment: observations of `observation`, actions 0 … num_actions-1."""

    observation: ArraySpec
    num_actions: int

    def __str__(self) -> str:
        return f"observation {self.observation}, {self.num_actions} actions"
