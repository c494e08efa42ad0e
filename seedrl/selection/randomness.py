"""Random numbers whose state a checkpoint can hold. Knows nothing of what they are drawn for."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

HALF = 2**64 - 1  # the lower half of numbers of 128 bits


def state_of(random: np.random.Generator) -> NDArray[np.int64]:
    """Return the state of a generator, in words that every file format knows."""
    whole: Any = random.bit_generator.state
    state, increment = whole["state"]["state"], whole["state"]["inc"]
    numbers = [state >> 64, state & HALF, increment >> 64, increment & HALF, whole["has_uint32"], whole["uinteger"]]
    return np.array(numbers, np.uint64).view(np.int64)


def restore(random: np.random.Generator, saved: NDArray[np.int64]) -> None:
    """Continue the random numbers at a state that `state_of` returned."""
    high, low, increment_high, increment_low, has_uint32, uinteger = (int(number) for number in saved.view(np.uint64))
    random.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": (high << 64) | low, "inc": (increment_high << 64) | increment_low},
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }
