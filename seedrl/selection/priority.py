"""Proportional choice (Schaul et al. 2016, arXiv 1511.05952): unroll i is sampled with probability P(i) = m_i / Σ m.

The mass m_i of an unroll is its priority to the power of alpha. Its importance weight is (N P(i))^-beta, divided by the
largest of the train batch, so that weights only scale gradients down (section 3.4); N and Σ m cancel out. The draw is
stratified as in appendix B.2.1: one from each of B equal parts of the whole mass. Knows places of a ring, no entries.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from seedrl.selection import randomness
from seedrl.selection.base import Arrays, Priority
from seedrl.selection.ring import Choice

Mass = NDArray[np.float64]
Places = NDArray[np.int64]

FANOUT, TOP = 16, 512  # children of a node, and nodes at the top: numpy takes little longer for many than for one
SMALLEST = 1e-6  # priority: an unroll whose error is zero may still be sampled


class SumTree:
    """Sums of leaves, sums of these sums, and so on, up to some hundreds at the top. Owned by its chooser.

    A sum is always computed from its children and never changed by a difference, so that no error accumulates and the
    tree is a function of its leaves.
    """

    def __init__(self, size: int) -> None:
        widths = [max(1, -(-size // FANOUT))]
        while widths[-1] > TOP:
            widths.append(-(-widths[-1] // FANOUT))
        self._levels = [np.zeros((width, FANOUT)) for width in widths]  # the children of each node; leaves first
        self._top = np.zeros(widths[-1])
        self.leaves = self._levels[0].reshape(-1)[:size]  # a view

    def update(self, places: Places) -> None:
        """Bring the sums of these leaves up to date."""
        above = [level.reshape(-1) for level in self._levels[1:]] + [self._top]
        for children, sums in zip(self._levels, above, strict=True):
            places = places // FANOUT
            sums[places] = children.take(places, axis=0).sum(axis=1)

    def find(self, share: Mass) -> Places:
        """Return for each share of the total, from 0 to 1, the leaf at which the running sum of leaves exceeds it.

        Sums of the same leaves in another order differ by rounding, so that a mass may seem to lie beyond the last
        child of a node; it is moved before its end. A leaf without mass is never found.
        """
        sums = np.zeros(len(self._top) + 1)
        self._top.cumsum(out=sums[1:])
        mass = _below(share * sums[-1], sums[-1])
        node: Places = sums[1:].searchsorted(mass, side="right")
        mass, rows = mass - sums[node], np.arange(len(mass))
        for level in reversed(self._levels):
            sums = np.zeros((len(mass), FANOUT + 1))
            level.take(node, axis=0).cumsum(axis=1, out=sums[:, 1:])
            mass = _below(mass, sums[:, -1])
            child = (sums[:, 1:] > mass[:, np.newaxis]).argmax(axis=1)
            mass = mass - sums[rows, child]
            node = node * FANOUT + child
        return node


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
        places = self._tree.find((np.arange(count) + self._random.random(count)) / count)
        mass = self.mass.take(places)
        return Choice(places, ((mass.min() / mass) ** self._beta()).astype(np.float32))

    def arrays(self) -> Arrays:
        return {"random": randomness.state_of(self._random), "highest": np.array([self._highest])}

    def load(self, arrays: Arrays) -> None:
        randomness.restore(self._random, arrays["random"])
        self._highest = float(arrays["highest"][0])
