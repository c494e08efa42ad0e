"""Selectors: the choice of finished unrolls to train on, and of those that make room. Know only numbers of entries.

A selector is what makes a store a queue or a replay memory. The store calls it under its lock:

    add       the writer has finished unrolls
    can_pick  the learner asks whether it may train: the limiter on its side
    pick      the learner takes a train batch; its entries stay untouched until `done`
    done      the batch is copied; return the entries that are free now
    evict     the writer needs room; return entries that it may overwrite, or none, and the actors wait: the limiter on
              their side
    prefer    the learner hands back new priorities

Your own is named by import path: `store.select=my_module:MySelector` is called with the store's capacity, the batch
size, a seed and `store.options`.
"""

from collections import deque
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from seedrl import plugins
from seedrl.config import LearnerConfig
from seedrl.errors import ConfigError
from seedrl.sizes import store_capacity

Entries = NDArray[np.int64]


class Pick(NamedTuple):
    """A train batch, by the entries of its unrolls."""

    entries: Entries  # [B]
    weight: NDArray[np.float32]  # [B]  importance weights


class Selector(Protocol):
    """Owned by the store, which calls it under its lock."""

    def __len__(self) -> int:
        """Return how many finished unrolls it knows, those that are picked and not done left out."""
        ...

    def add(self, entries: Entries) -> None: ...

    def can_pick(self, count: int) -> bool: ...

    def pick(self, count: int) -> Pick: ...

    def done(self, entries: Entries) -> Entries: ...

    def evict(self, count: int) -> Entries: ...

    def prefer(self, entries: Entries, priority: NDArray[np.float32]) -> None: ...


class Fifo:
    """A queue: the oldest unrolls first, each exactly once. It evicts nothing, so a full store slows the actors."""

    def __init__(self, capacity: int = 0, batch_size: int = 0, seed: int = 0) -> None:
        self._ready: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._ready)

    def add(self, entries: Entries) -> None:
        self._ready.extend(entries.tolist())

    def can_pick(self, count: int) -> bool:
        return len(self._ready) >= count

    def pick(self, count: int) -> Pick:
        entries = np.array([self._ready.popleft() for _ in range(count)], np.int64)
        return Pick(entries, np.ones(count, np.float32))

    def done(self, entries: Entries) -> Entries:
        return entries

    def evict(self, count: int) -> Entries:
        return np.empty(0, np.int64)

    def prefer(self, entries: Entries, priority: NDArray[np.float32]) -> None:
        """A queue has no preference."""


class Fresh(Fifo):
    """The queue of an on-policy run: all that is ready when a train batch is picked, and is not in it, is dropped.

    No step is taken during an update, so that every finished unroll is of a policy that the update replaces. There are
    more than a train batch after an actor was lost and came back; without this they would remain, always one update
    too old. `seedrl_unrolls_made_total` minus `seedrl_unrolls_trained_total` shows how many were dropped.
    """

    def __init__(self, capacity: int = 0, batch_size: int = 0, seed: int = 0) -> None:
        super().__init__()
        self._dropped: list[int] = []

    def pick(self, count: int) -> Pick:
        self._dropped += [self._ready.popleft() for _ in range(len(self._ready) - count)]
        return super().pick(count)

    def done(self, entries: Entries) -> Entries:
        dropped, self._dropped = self._dropped, []
        return np.concatenate([entries, np.array(dropped, np.int64)])


BUILT_IN = {"fifo": Fifo}


def build_selector(config: LearnerConfig) -> Selector:
    """Return the selector that the settings name."""
    if config.algorithm.on_policy and config.store.select == "fifo":
        return Fresh()
    name, sizes = config.store.select, (store_capacity(config), config.algorithm.batch_size, config.seed)
    if plugins.is_import_path(name):
        selector: Selector = plugins.build("store.select", name, *sizes, **config.store.options)
        return selector
    if name not in BUILT_IN:
        raise ConfigError(f"store.select={name!r} is not one of {', '.join(BUILT_IN)} or your.module:Class")
    return BUILT_IN[name](*sizes)
