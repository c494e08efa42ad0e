"""The unrolls: the hand-off from serving to learning. Knows nothing of streams, models or losses.

One preallocated ring of entries, each with room for one unroll (columns.py). Each slot always owns one entry, which
inference writes row by row; `capacity` further entries are free or hold finished unrolls, and the last one is spare.

    free ──reserve──→ written by its slot ──commit──→ finished ──take──→ finished or free, as the selector decides
      ↑                                                  │
      └────────────────── the selector evicts ───────────┘

Which finished unrolls are trained on, how often, and when their entries are free again is up to the selector
(selection/). Consecutive unrolls of a slot share `overlap` rows: the last ones of one are the first ones of the next.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from seedrl.columns import Columns, Indices
from seedrl.config import LearnerConfig
from seedrl.device import finish
from seedrl.errors import require
from seedrl.run.checkpoint import Tensors, with_prefix, without_prefix
from seedrl.selection.base import Limits, Selector
from seedrl.sizes import store_capacity
from seedrl.specs import EnvSpec
from seedrl.types import Recorded, Ticket, Unrolls


def _layout(tensors: Tensors) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return what the tensors of a checkpoint are, whatever number of unrolls they hold."""
    return {name: (tensor.dtype, tensor.shape[1:]) for name, tensor in tensors.items()}


class StoreSizes(NamedTuple):
    slots: int
    capacity: int  # finished unrolls
    unroll_length: int
    frame_stack: int
    core_size: int
    overlap: int = 1

    @classmethod
    def of(cls, config: LearnerConfig, core_size: int, overlap: int = 1) -> "StoreSizes":
        """Return the sizes that a run's store has."""
        return cls(
            slots=config.serving.max_slots,
            capacity=store_capacity(config),
            unroll_length=config.algorithm.unroll_length,
            frame_stack=config.env.frame_stack,
            core_size=core_size,
            overlap=overlap,
        )

    def columns(self, spec: EnvSpec, entries: int, device: torch.device, memory: torch.device | None = None) -> Columns:
        lengths = (self.unroll_length, self.frame_stack, self.core_size, self.overlap)
        return Columns(spec, entries, *lengths, device, memory)


class StoreBytes(NamedTuple):
    """The memory of a store."""

    device: int
    host: int


class Store:
    """Thread-safe between one writer (inference) and one reader (learner): no entry belongs to both at a time."""

    def __init__(
        self,
        spec: EnvSpec,
        selector: Selector,
        sizes: StoreSizes,
        device: torch.device,
        on_free: Callable[[], None] = lambda: None,
        priority_of: Callable[[Recorded], Tensor] | None = None,
        record: Callable[[Tensors], None] | None = None,
        memory: torch.device | None = None,
    ) -> None:
        """`on_free` is called by the thread that has taken unrolls, when entries may be free.

        `priority_of` returns the priorities [B] of unrolls that have just been finished, and `record` gets copies of
        them, both in the writer's thread. `memory` is where unrolls are kept, if not on the device.
        """
        require(
            2 * sizes.overlap <= sizes.unroll_length + 1,
            f"algorithm.unroll_length={sizes.unroll_length} is too short for unrolls that share {sizes.overlap} rows",
        )
        self.capacity = sizes.capacity
        entries = sizes.slots + sizes.capacity
        self.columns = sizes.columns(spec, entries + 1, device, memory)
        self._device = device
        self._on_free = on_free
        self._priority_of = priority_of
        self._record = record
        self._selector = selector
        self._generation = np.zeros(entries, np.int64)  # unrolls that each entry has held
        self._free = list(range(sizes.slots, entries))
        self._changed = threading.Condition()  # guards the three above

    @staticmethod
    def bytes_needed(spec: EnvSpec, sizes: StoreSizes) -> StoreBytes:
        """Return the bytes that a store of these sizes takes, without making one."""
        entries = sizes.slots + sizes.capacity + 1
        one = sizes.columns(spec, 1, torch.device("meta"))
        return StoreBytes(entries * one.nbytes, entries * one.host_nbytes)

    @property
    def ready(self) -> int:
        """Return how many finished unrolls the selector can choose from."""
        return len(self._selector)

    def limits(self) -> Limits:
        """Return which settings hold the learner or the actors back."""
        with self._changed:
            return self._selector.limits()

    # For inference.

    def reserve(self, count: int) -> Indices:
        """Return up to `count` entries to write to: free ones, and those that the selector evicts.

        As many finished unrolls have to be committed next.
        """
        with self._changed:
            count = self._selector.may_add(count)
            if count > len(self._free):
                self._free.extend(self._selector.evict(count - len(self._free)).tolist())
            # The newest first: what was read last is still in the caches.
            return np.array([self._free.pop() for _ in range(min(count, len(self._free)))], np.int64)

    def commit(self, entries: Indices) -> None:
        """Hand finished unrolls over to the selector.

        The host has waited for whatever serving wrote there on the device, so that the learner's stream need not wait.
        """
        versions = self.columns.last_versions(entries)
        priority = None
        if self._priority_of is not None:
            priority = self._priority_of(self.columns.recorded(entries)).float().cpu().numpy()
        if self._record is not None:
            self._record(self.columns.read(entries))
        with self._changed:
            self._generation[entries] += 1
            self._selector.add(entries, versions, priority)
            self._changed.notify()

    def take_dropped(self) -> dict[str, int]:
        """Return by reason how many finished unrolls the selector has dropped since the last call."""
        with self._changed:
            return self._selector.take_dropped()

    # For the learner.

    def can_take(self, count: int) -> bool:
        """Return whether the selector lets the learner train on `count` unrolls now."""
        with self._changed:
            return self._selector.can_pick(count)

    def wait_for(self, count: int, timeout: float) -> bool:
        """Wait until the learner may train on `count` unrolls; return false at the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._selector.can_pick(count), timeout)

    def take(self, count: int, timeout: float) -> Unrolls | None:
        """Return copies of `count` unrolls that the selector picks; None at the timeout."""
        with self._changed:
            if not self.wait_for(count, timeout):
                return None
            entries, weight = self._selector.pick(count)
            ticket = Ticket(entries, self._generation[entries])
        unrolls = self.columns.gather(ticket, weight)
        finish(self._device)  # before inference may write there
        with self._changed:
            self._free.extend(self._selector.done(entries).tolist())
        self._on_free()
        return unrolls

    def prefer(self, ticket: Ticket, priority: Tensor) -> None:
        """Hand new priorities [B] to the selector; unrolls that have been overwritten meanwhile are ignored."""
        values = priority.detach().float().cpu().numpy()
        with self._changed:
            is_there = self._generation[ticket.entry] == ticket.generation
            self._selector.prefer(ticket.entry[is_there], values[is_there])

    # For checkpoints.

    def tensors(self) -> Tensors:
        """Return the finished unrolls that the selector keeps, and what it knows of them; the writer waits."""
        with self._changed:
            known = {name: torch.from_numpy(array) for name, array in self._selector.arrays().items()}
            unrolls = self.columns.read(self._selector.known())
        return {**with_prefix("selector", known), **with_prefix("unrolls", unrolls)}

    def load(self, tensors: Tensors) -> bool:
        """Restore `tensors` to a store without unrolls; return false if they are not of a store like this one."""
        unrolls, known = without_prefix("unrolls", tensors), without_prefix("selector", tensors)
        if _layout(tensors) != _layout(self.tensors()) or len(unrolls["reward"]) > self.capacity:
            return False
        with self._changed:
            entries = np.array([self._free.pop() for _ in range(len(unrolls["reward"]))], np.int64)
            self.columns.write(entries, unrolls)
            self._generation[entries] += 1
            self._selector.load(entries, {name: tensor.numpy() for name, tensor in known.items()})
        finish(self._device)
        return True

    def blank(self, count: int) -> Unrolls:
        """Return unrolls of zeros and of ends: none of their transitions is valid."""
        ticket = Ticket(np.zeros(count, np.int64), np.zeros(count, np.int64))
        unrolls = self.columns.gather(ticket, np.zeros(count, np.float32)).tree_map(torch.zeros_like)
        ends = torch.ones_like(unrolls.terminated)
        version = np.zeros_like(unrolls.policy_version)
        return unrolls._replace(terminated=ends, truncated=ends, policy_version=version)
