"""Environments with Gymnasium's interface that draw themselves, or not. Quick to import: processes do."""

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Counter:
    """An environment with Gymnasium's interface that shows how many steps were taken; it ends after five."""

    class Box:
        shape, dtype = (2,), np.dtype("float32")

    class Discrete:
        shape, dtype, n = (), np.dtype("int64"), 3

    observation_space, action_space = Box(), Discrete()

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self._steps = 0

    def reset(self, seed: int | None = None) -> tuple[NDArray[Any], dict[str, Any]]:
        self._steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._observation(), 1.0, self._steps == 5, False, {}

    def render(self) -> NDArray[Any]:
        return np.full((20, 31, 3), 40 * self._steps, np.uint8)

    def _observation(self) -> NDArray[Any]:
        return np.array([self._steps, 0.0], np.float32)


class Screen(Counter):
    """Its observations are pictures; it does not know how to be asked for others."""

    class Box(Counter.Box):
        shape, dtype = (1, 40, 40), np.dtype("uint8")

    observation_space = Box()

    def __init__(self) -> None:
        super().__init__()

    def _observation(self) -> NDArray[Any]:
        return np.full((1, 40, 40), 40 * self._steps, np.uint8)


class Blind(Counter):
    def __init__(self) -> None:
        super().__init__()


def ending(**options: Any) -> None:
    """An environment that ends the process instead of raising, as MuJoCo does without OpenGL."""
    os._exit(7)
