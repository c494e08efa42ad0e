"""Recorded unrolls as the source of train batches, in place of actors. Knows nothing of who recorded them.

Everything happens in the learner thread: it writes unrolls to the store before it takes a train batch, so that the same
files give the same train batches, whatever the selector. Each epoch has all unrolls once, in an order that follows from
the seed: shards are shuffled, and unrolls within each.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from seedrl.errors import require
from seedrl.metrics import ServingMetrics
from seedrl.recordings.files import Recording, load_shard
from seedrl.run.checkpoint import Tensors
from seedrl.store import Store
from seedrl.types import Unrolls


class RecordedUnrolls:
    """Owned by the learner thread."""

    def __init__(
        self, recording: Recording, store: Store, metrics: ServingMetrics, seed: int, updates: Callable[[], int]
    ) -> None:
        """Continue where the counters are; `updates` is the version that unrolls get, as if the newest policy acted."""
        self._recording = recording
        self._store = store
        self._metrics = metrics
        self._seed = seed
        self._updates = updates
        self._parts: Iterator[Tensors] | None = None

    def wait_for(self, count: int, timeout: float) -> bool:
        """Feed the store, at least once, until a train batch can be taken."""
        while self._feed(count) and not self._store.can_take(count):
            pass
        return self._store.can_take(count)

    def take(self, count: int, timeout: float) -> Unrolls | None:
        return self._store.take(count, timeout)

    def blank(self, count: int) -> Unrolls:
        return self._store.blank(count)

    def _feed(self, count: int) -> bool:
        """Write up to `count` unrolls to the store; return false if it takes none now."""
        entries = self._store.reserve(count)
        if not len(entries):
            return False
        self._parts = self._parts or self._from(self._metrics.unrolls_made)
        unrolls = self._next(len(entries))
        self._store.columns.write(entries, unrolls)
        self._store.commit(entries)
        self._metrics.unrolls_made += len(entries)
        self._metrics.env_steps += len(entries) * self._store.columns.unroll_length
        self._metrics.reward_sum += float(unrolls["reward"][:, 1:].sum())
        return True

    def _next(self, count: int) -> Tensors:
        """Return the next unrolls, as the store holds them."""
        assert self._parts is not None
        parts = [next(self._parts) for _ in range(count)]
        unrolls = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        core_size = self._store.columns.core_size
        if unrolls["core_state"].shape[1] != core_size:  # of another model
            unrolls["core_state"] = torch.zeros(count, core_size)
        return {**unrolls, "policy_version": torch.full_like(unrolls["policy_version"], self._updates())}

    def _from(self, number: int) -> Iterator[Tensors]:
        """Yield single unrolls for ever, from the one that has this number on."""
        epoch, skipped = divmod(number, self._recording.unrolls)
        while True:
            order = np.random.default_rng([self._seed, epoch])
            for index in order.permutation(len(self._recording.shards)):
                path, shard = self._recording.shards[index]
                places = order.permutation(shard.unrolls)
                if skipped >= len(places):
                    skipped -= len(places)
                    continue
                content = load_shard(path)
                for place in places[skipped:].tolist():
                    yield {name: tensor[place] for name, tensor in content.items()}
                skipped = 0
            epoch += 1


def check_recording(recording: Recording, env: str, unroll_length: int, frame_stack: int) -> None:
    """Raise ConfigError if recorded unrolls are not those that the settings describe."""
    content = recording.content
    for setting, wanted, found in (
        ("env.id", env, content.env),
        ("algorithm.unroll_length", unroll_length, content.unroll_length),
        ("env.frame_stack", frame_stack, content.frame_stack),
    ):
        require(wanted == found, f"source: the unrolls were recorded with {setting}={found}; set that, not {wanted}")
