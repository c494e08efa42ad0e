"""The rows that actors send: the newest step of several environments, and its flags. Knows nothing of the wire."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seedrl.specs import Arrays

TERMINATED, TRUNCATED, RESET, LIFE = 1, 2, 4, 8  # flags of a row; their values are those of the protocol
ENDED = TERMINATED | TRUNCATED
KNOWN_FLAGS = bytes(range(TERMINATED + TRUNCATED + RESET + LIFE + 1))  # every sum of flags


class Rows(NamedTuple):
    """The newest step of n environments."""

    env_id: NDArray[np.int32]  # [n]
    observation: Arrays  # [n, ...]
    reward: NDArray[np.float32]  # [n]
    flags: NDArray[np.uint8]  # [n]  a sum of TERMINATED, TRUNCATED, RESET and LIFE


def ends_game(flags: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Tell which rows are the last of an episode that is counted; a lost life ends one for training only."""
    is_last: NDArray[np.bool_] = ((flags & ENDED) != 0) & ((flags & LIFE) == 0)
    return is_last
