"""The versioned weights that inference reads: the hand-off from learning to serving. Knows nothing of either."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from seedrl.device import after_serving, finish
from seedrl.models.precision import replica_weights


class Policy:
    """Thread-safe: one publisher, one reader.

    Two replicas on the device. The publisher copies into the one that is not current and then makes it current, so
    the reader never waits for an optimiser step; each replica's lock keeps a copy from overtaking a running forward.
    """

    def __init__(self, model: nn.Module, version: int) -> None:
        self._replicas = [copy.deepcopy(model).requires_grad_(False).eval() for _ in range(2)]
        for replica in self._replicas:
            replica_weights(replica)
        self._locks = [threading.Lock(), threading.Lock()]
        self._current = 0
        self._version = version
        self._published = threading.Condition()

    @property
    def version(self) -> int:
        return self._version

    @contextmanager
    def read(self) -> Iterator[tuple[nn.Module, int]]:
        """Yield the newest model and its version; neither changes inside the block."""
        with self._published:
            current, version = self._current, self._version
            self._locks[current].acquire()
        try:
            yield self._replicas[current], version
        finally:
            self._locks[current].release()

    def replicas(self) -> Iterator[nn.Module]:
        """Yield each replica in turn; it does not change until the next one is asked for."""
        for replica, lock in zip(self._replicas, self._locks, strict=True):
            with lock:
                yield replica

    @torch.no_grad()
    def publish(self, model: nn.Module, version: int) -> None:
        """Copy the weights, device to device; the next batch uses them."""
        spare = 1 - self._current
        with self._locks[spare]:
            source, target = model.state_dict(), self._replicas[spare].state_dict()
            device = next(iter(source.values())).device
            after_serving(device)  # which may still read this replica, as its lock is free once a batch is launched
            torch._foreach_copy_([target[name] for name in source], list(source.values()))
            finish(device)  # before inference reads it
        with self._published:
            self._current, self._version = spare, version
            self._published.notify_all()

    def wait_for(self, version: int, timeout: float) -> bool:
        """Wait until `version` or a later one is current; return false at the timeout."""
        with self._published:
            return self._published.wait_for(lambda: self._version >= version, timeout)
