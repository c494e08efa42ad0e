"""Queues: each unroll is trained on at most once. Know nothing of what unrolls hold."""

from collections import deque

import numpy as np

from seedrl.selection.base import NONE, Entries, Pick, Priority, Selector


class Fifo(Selector):
    """A queue: the oldest unrolls first, each exactly once. It evicts nothing, so a full store slows the actors."""

    def __init__(self) -> None:
        self._ready: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, entries: Entries, versions: Entries, priority: Priority | None = None) -> None:
        self._ready.extend(entries.tolist())

    def can_pick(self, count: int) -> bool:
        return len(self._ready) >= count

    def pick(self, count: int) -> Pick:
        entries = np.array([self._ready.popleft() for _ in range(count)], np.int64)
        return Pick(entries, np.ones(count, np.float32))

    def done(self, entries: Entries) -> Entries:
        return entries

    def evict(self, count: int) -> Entries:
        return NONE

    def prefer(self, entries: Entries, priority: Priority) -> None:
        """Do nothing: a queue has no preference."""


class Fresh(Fifo):
    """The queue of an on-policy run: all that is ready when a train batch is picked, and is not in it, is dropped.

    No step is taken during an update, so that every finished unroll is of a policy that the update replaces. There are
    more than a train batch after an actor was lost and came back; without this they would remain, always one update
    too old.
    """

    def __init__(self) -> None:
        super().__init__()
        self._leftover: list[int] = []
        self._dropped = 0

    def pick(self, count: int) -> Pick:
        self._leftover += [self._ready.popleft() for _ in range(len(self._ready) - count)]
        return super().pick(count)

    def done(self, entries: Entries) -> Entries:
        leftover, self._leftover = self._leftover, []
        self._dropped += len(leftover)
        return np.concatenate([entries, np.array(leftover, np.int64)])

    def take_dropped(self) -> dict[str, int]:
        dropped, self._dropped = self._dropped, 0
        return {"off_policy": dropped}
