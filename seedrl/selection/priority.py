"""Proportional choice (Schaul et al. 2016, arXiv 1511.05952): unroll i is sampled with probability P(i) = m_i / Σ m.

The mass m_i of an unroll is its priority to the power of alpha. Its importance weight is (N P(i))^-beta, divided by the
largest of the train batch, so that weights only scale gradients down (section 3.4). The draw is stratified as in
appendix B.2.1: one from each of B equal parts of the whole mass. Knows nothing of entries, but places of a ring.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from seedrl.selection import randomness
from seedrl.selection.base import Arrays, Priority
from seedrl.selection.ring import Choice

Mass = NDArray[np.float64]
Places = NDArray[np.int64]

BLOCK = 64  # leaves
SMALLEST = 1e-6  # priority: an unroll whose error is zero may still be sampled


class SumTree:
    """Leaves in blocks, and the sum of each block. Owned by its chooser.

    Two levels are enough, and they are wide: numpy takes about as long for one number as for a thousand. A sum is
    always computed from its leaves and never changed by a difference, so that no error accumulates and the tree is a
    function of its leaves.
    """

    def __init__(self, size: int) -> None:
        self._blocks = np.zeros((-(-size // BLOCK), BLOCK))
        self._sums = np.zeros(len(self._blocks))
        self.leaves = self._blocks.reshape(-1)[:size]  # a view

    @property
    def total(self) -> float:
        return float(self._sums.sum())

    def update(self, places: Places) -> None:
        """Bring the sums of these leaves up to date."""
        blocks = places // BLOCK
        self._sums[blocks] = self._blocks[blocks].sum(axis=1)

    def find(self, mass: Mass) -> Places:
        """Return for each mass, from 0 to the total, the leaf at which the running sum of all leaves exceeds it.

        Sums of the same leaves in another order differ by rounding, so that a mass may seem to lie beyond the last
        one; it is moved before it. A leaf without mass is never found.
        """
        starts = np.concatenate(([0.0], self._sums.cumsum()))
        block: Places = starts[1:].searchsorted(_below(mass, starts[-1]), side="right")
        sums = self._blocks[block].cumsum(axis=1)
        within = _below(mass - starts[block], sums[:, -1])
        child: Places = (sums > within[:, np.newaxis]).argmax(axis=1)
        return block * BLOCK + child


def _below(mass: Mass, end: Mass) -> Mass:
    """Return the masses, or the largest number below `end` for those that are not below it."""
    return np.minimum(mass, np.nextafter(end, 0.0))


class Proportional:
    """A chooser (ring.py). Owned by its ring."""

    def __init__(self, capacity: int, seed: int, alpha: float, beta: Callable[[], float]) -> None:
        """`beta` may change during the run."""
        self._tree = SumTree(capacity)
        self._alpha = alpha
        self._beta = beta
        self._highest = 1.0  # priority so far, for new unrolls about which nothing is known
        self._random = np.random.default_rng(seed)

    @property
    def mass(self) -> Mass:
        return self._tree.leaves

    def mass_of(self, count: int, priority: Priority | None) -> Mass:
        """Return the mass of unrolls with these priorities; NaN where a priority is not a number of at least 0."""
        if priority is None:
            return np.full(count, self._highest**self._alpha)
        known = np.where(np.isfinite(priority) & (priority >= 0), priority, np.nan).astype(np.float64)
        self._highest = float(np.nanmax(known, initial=self._highest))
        mass: Mass = np.maximum(known, SMALLEST) ** self._alpha
        return mass

    def changed(self, places: Places) -> None:
        self._tree.update(places)

    def choose(self, count: int, size: int) -> Choice:
        total = self._tree.total
        places = self._tree.find((np.arange(count) + self._random.random(count)) * (total / count))
        weight = (size / total * self.mass[places]) ** -self._beta()
        return Choice(places, (weight / weight.max()).astype(np.float32))

    def arrays(self) -> Arrays:
        return {"random": randomness.state_of(self._random), "highest": np.array([self._highest])}

    def load(self, arrays: Arrays) -> None:
        randomness.restore(self._random, arrays["random"])
        self._highest = float(arrays["highest"][0])
