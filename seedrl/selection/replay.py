"""A replay memory: a ring of unrolls, a limiter and a bound on their age. Knows nothing of how unrolls are drawn."""

from collections.abc import Callable

from seedrl.selection.base import Arrays, Entries, Limits, Pick, Priority, Selector
from seedrl.selection.limiter import Limiter
from seedrl.selection.ring import Ring


class Replay(Selector):
    """The newest unrolls, any of them again and again; the oldest make room, so that a full store slows nothing."""

    def __init__(
        self, ring: Ring, limiter: Limiter, *, batch_size: int, max_staleness: int, updates: Callable[[], int]
    ) -> None:
        """`updates` is the version of the newest policy; with max_staleness=0 unrolls may be of any age."""
        self._ring = ring
        self._limiter = limiter
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._updates = updates

    def __len__(self) -> int:
        return len(self._ring)

    def may_add(self, count: int) -> int:
        return self._limiter.may_insert(count)

    def add(self, entries: Entries, versions: Entries, priority: Priority | None = None) -> None:
        """Take over finished unrolls, except those that are too old already."""
        is_stale = versions < self._oldest_version
        if is_stale.any():
            self._ring.reject(entries[is_stale])
            entries, versions = entries[~is_stale], versions[~is_stale]
            priority = None if priority is None else priority[~is_stale]
        self._ring.add(entries, versions, priority)
        self._limiter.inserted(len(entries), len(self._ring))

    def can_pick(self, count: int) -> bool:
        if self._max_staleness:
            self._ring.drop_older(self._oldest_version)
            self._limiter.resized(len(self._ring))
        return self._limiter.may_sample(count)

    def pick(self, count: int) -> Pick:
        self._limiter.sampled(count)
        return self._ring.choose(count)

    def done(self, entries: Entries) -> Entries:
        free = self._ring.done(entries)
        self._limiter.resized(len(self._ring))
        return free

    def evict(self, count: int) -> Entries:
        """Return entries to overwrite; a train batch always stays, so that the learner never loses one it waits for."""
        return self._ring.evict(count, keep=self._batch_size)

    def prefer(self, entries: Entries, priority: Priority) -> None:
        self._ring.prefer(entries, priority)

    def limits(self) -> Limits:
        return self._limiter.limits

    def take_dropped(self) -> dict[str, int]:
        return self._ring.take_dropped()

    @property
    def _oldest_version(self) -> int:
        """Return the oldest version that may still be trained on."""
        return self._updates() - self._max_staleness if self._max_staleness else 0

    def known(self) -> Entries:
        return self._ring.known()

    def arrays(self) -> Arrays:
        return {**self._ring.arrays(), "limiter": self._limiter.array()}

    def load(self, entries: Entries, arrays: Arrays) -> None:
        self._ring.load(entries, arrays)
        self._limiter.load(arrays["limiter"])
