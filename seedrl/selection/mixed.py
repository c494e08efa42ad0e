"""New unrolls and old ones together: a queue whose unrolls are kept, so that a share of each train batch is replayed.

For algorithms that correct for the age of unrolls. Every unroll is trained on once as a new one; how often it returns
follows from the share and not from a limiter. Knows nothing of how old ones are drawn.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from seedrl.selection.base import Arrays, Entries, Pick, Priority, Selector
from seedrl.selection.ring import Ring

BACKLOG = 2  # train batches of new unrolls that may wait: as many as a queue holds by default


class Mixed(Selector):
    """A queue before a ring. Actors wait while too many new unrolls do."""

    def __init__(
        self, ring: Ring, *, batch_size: int, replay_share: float, max_staleness: int, updates: Callable[[], int]
    ) -> None:
        """`updates` is the version of the newest policy; with max_staleness=0 unrolls may be of any age."""
        self._ring = ring
        self._replayed = round(replay_share * batch_size)  # unrolls of a train batch that are old
        self._backlog = BACKLOG * batch_size
        self._max_staleness = max_staleness
        self._updates = updates
        self._new: deque[tuple[int, int]] = deque()  # entry and version
        self._picked: list[tuple[int, int]] = []  # new ones that are not done

    def __len__(self) -> int:
        return len(self._new) + len(self._ring)

    def may_add(self, count: int) -> int:
        return min(count, max(0, self._backlog - len(self._new)))

    def add(self, entries: Entries, versions: Entries, priority: Priority | None = None) -> None:
        self._new.extend(zip(entries.tolist(), versions.tolist(), strict=True))

    def can_pick(self, count: int) -> bool:
        if self._max_staleness:
            self._ring.drop_older(self._updates() - self._max_staleness)
        return len(self._new) >= count - self._old

    def pick(self, count: int) -> Pick:
        """Return new unrolls first, and old ones after them."""
        old = self._ring.choose(self._old)
        self._picked = [self._new.popleft() for _ in range(count - len(old.entries))]
        new = np.array([entry for entry, _ in self._picked], np.int64)
        return Pick(np.concatenate([new, old.entries]), np.ones(count, np.float32))

    def done(self, entries: Entries) -> Entries:
        """Keep the new unrolls of the train batch as old ones from now on."""
        count = len(self._picked)
        free = self._ring.done(entries[count:])
        versions = np.array([version for _, version in self._picked], np.int64)
        self._ring.add(entries[:count], versions, uses=1)
        self._picked = []
        return free

    def evict(self, count: int) -> Entries:
        return self._ring.evict(count, keep=self._replayed)

    def prefer(self, entries: Entries, priority: Priority) -> None:
        """Do nothing: old unrolls are all alike."""

    def take_dropped(self) -> dict[str, int]:
        return self._ring.take_dropped()

    @property
    def _old(self) -> int:
        """Return how many old unrolls the next train batch has: fewer at first, while there are few."""
        return min(self._replayed, len(self._ring))

    # For checkpoints, which keep the old unrolls only.

    def known(self) -> Entries:
        return self._ring.known()

    def arrays(self) -> Arrays:
        return self._ring.arrays()

    def load(self, entries: Entries, arrays: Arrays) -> None:
        self._ring.load(entries, arrays)
