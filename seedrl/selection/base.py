"""Selectors: the choice of finished unrolls to train on, and of those that make room. Know only numbers of entries.

A selector is what makes a store a queue or a replay memory. The store calls it under its lock:

    may_add   the writer asks how many unrolls it may finish: the limiter on the actors' side
    add       the writer has finished unrolls
    can_pick  the learner asks whether it may train: the limiter on its side
    pick      the learner takes a train batch; its entries stay untouched until `done`
    done      the batch is copied; return the entries that are free now
    evict     the writer needs room; return entries that it may overwrite, or none, and the actors wait
    prefer    the learner hands back new priorities

Your own is named by import path: `store.select=my_module:MySelector` is called with the store's capacity, the batch
size, a seed and `store.options`. It derives from `Selector`, which has those methods that many can do without.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Entries = NDArray[np.int64]
Priority = NDArray[np.float32]
Arrays = dict[str, NDArray[Any]]

NONE: Entries = np.empty(0, np.int64)
FILLING = "store.min_size"  # the setting that holds the learner back until there are enough unrolls


class Pick(NamedTuple):
    """A train batch, by the entries of its unrolls."""

    entries: Entries  # [B]
    weight: NDArray[np.float32]  # [B]  importance weights


class Limits(NamedTuple):
    """The settings that hold the learner or the actors back at the moment; empty for none."""

    learner: str = ""
    actors: str = ""


class Selector(Protocol):
    """Owned by the store, which calls it under its lock."""

    def __len__(self) -> int:
        """Return how many finished unrolls it can choose from."""
        ...

    def add(self, entries: Entries, versions: Entries, priority: Priority | None = None) -> None:
        """Take over finished unrolls; `versions` are of the policy that chose the last action of each.

        `priority` is how much each is worth before it has ever been trained on, if the algorithm tells.
        """
        ...

    def can_pick(self, count: int) -> bool: ...

    def pick(self, count: int) -> Pick: ...

    def done(self, entries: Entries) -> Entries: ...

    def evict(self, count: int) -> Entries: ...

    def prefer(self, entries: Entries, priority: Priority) -> None: ...

    def may_add(self, count: int) -> int:
        """Return how many of `count` unrolls may be finished now."""
        return count

    def limits(self) -> Limits:
        """Return which settings hold the learner or the actors back."""
        return Limits()

    def take_dropped(self) -> dict[str, int]:
        """Return by reason how many unrolls were dropped since the last call; metrics.py has the reasons."""
        return {}

    def known(self) -> Entries:
        """Return the entries of the unrolls that a checkpoint keeps, in the order of `arrays`."""
        return NONE

    def arrays(self) -> Arrays:
        """Return what a checkpoint keeps of the selector."""
        return {}

    def load(self, entries: Entries, arrays: Arrays) -> None:
        """Restore `arrays` to an empty selector; the unrolls of `known` are in these entries now."""
        return
