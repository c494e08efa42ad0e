"""The limiter of a replay memory: it matches how fast actors add unrolls and how fast the learner samples them.

After the first `min_size` unrolls, which only fill the memory, every unroll that is added earns the learner
`samples_per_insert` samples, and every sample costs one. The balance of both is the *credit*:

    the learner may sample n unrolls    while  credit - n >= -tolerance
    actors may add n unrolls            while  credit + n * samples_per_insert <= tolerance

One side can always continue if 2 * tolerance >= batch_size + samples_per_insert: if the credit is too low for a train
batch, it is low enough for another unroll. Knows nothing of which unrolls are sampled.
"""

import math

import numpy as np
from numpy.typing import NDArray

from seedrl.selection.base import FILLING, Limits

RATIO = "store.samples_per_insert"


class Limiter:
    """Owned by its selector."""

    def __init__(self, batch_size: int, min_size: int, samples_per_insert: float, tolerance: float) -> None:
        """With samples_per_insert=0 neither side waits for the other."""
        self._batch_size = batch_size
        self._min_size = max(min_size, batch_size)
        self._samples_per_insert = samples_per_insert
        self._tolerance = tolerance
        self.credit = 0.0  # samples
        self.is_filled = False  # from when there are min_size unrolls until there is no train batch any more

    def may_sample(self, count: int) -> bool:
        if not self.is_filled:
            return False
        return not self._samples_per_insert or self.credit - count >= -self._tolerance

    def may_insert(self, count: int) -> int:
        """Return how many of `count` unrolls may be added."""
        if not self.is_filled or not self._samples_per_insert:
            return count
        room = math.floor((self._tolerance - self.credit) / self._samples_per_insert)
        return min(count, max(0, room))

    def inserted(self, count: int, size: int) -> None:
        """Count unrolls that were added; there are `size` now."""
        if self.is_filled:
            self.credit += count * self._samples_per_insert
        self.resized(size)

    def sampled(self, count: int) -> None:
        self.credit -= count if self._samples_per_insert else 0

    def resized(self, size: int) -> None:
        """Note how many unrolls there are. A memory that ran dry is filled again."""
        self.is_filled = size >= (self._batch_size if self.is_filled else self._min_size)

    @property
    def limits(self) -> Limits:
        if not self.is_filled:
            return Limits(learner=FILLING)
        learner = "" if self.may_sample(self._batch_size) else RATIO
        return Limits(learner, "" if self.may_insert(1) else RATIO)

    def array(self) -> NDArray[np.float64]:
        """Return what a checkpoint keeps."""
        return np.array([self.credit, self.is_filled], np.float64)

    def load(self, array: NDArray[np.float64]) -> None:
        self.credit, self.is_filled = float(array[0]), bool(array[1])
