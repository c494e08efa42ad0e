"""Sampling a train batch from a ring of 100,000 unrolls against taking the oldest from a queue of as many.

The unrolls are as small as CartPole's, so that the choice and not the copy of their rows is what differs.
"""

import numpy as np
import torch

from bench.harness import Report, cost_ratio, for_a_while, interleave, median
from bench.rig import CPU
from seedrl.columns import Record
from seedrl.config import BenchConfig, LearnerConfig
from seedrl.selection.build import build_selector
from seedrl.specs import ArraySpec, CategoricalSpec, EnvSpec
from seedrl.store import Store, StoreSizes
from seedrl.types import ModelOutput

SPEC = EnvSpec(ArraySpec((4,), "float32"), CategoricalSpec((2,)))
UNROLLS = 100_000


def run(config: BenchConfig) -> Report:
    torch.set_num_threads(1)
    report = Report("replay")
    queue = FilledStore("fifo")
    for select in ("uniform", "priority"):
        ring = FilledStore(select)
        works = {select: ring.take, "fifo": queue.take}
        turns = interleave(for_a_while(works, config.seconds), config.repeats)
        for side, measured in turns.items():
            cost = median(measured, lambda turn: turn.cpu_us)
            report.add({"side": side, "ring": UNROLLS, "CPU µs per unroll": cost})
        report.add_ratio(cost_ratio(f"{select}_over_fifo", turns, select, "fifo", bound=1.1))
    return report


class FilledStore:
    """A store full of unrolls, with priorities of all sizes; a queue is filled again when it is empty."""

    def __init__(self, select: str) -> None:
        config = LearnerConfig()
        config.store.select, config.store.capacity = select, UNROLLS
        config.algorithm.unroll_length, config.algorithm.batch_size = 64, 32
        self.batch_size = config.algorithm.batch_size
        self._store = Store(SPEC, build_selector(config), StoreSizes.of(config, core_size=0)._replace(slots=1), CPU)
        self._random = np.random.default_rng(1)
        self._write_rows()
        self._fill()
        if select == "priority":
            self._set_priorities()

    def take(self) -> int:
        if self._store.take(self.batch_size, timeout=0) is None:
            self._fill()
        return self.batch_size

    def _fill(self) -> None:
        """Finish unrolls in any order, so that a queue reads rows from all over the memory, as a ring does."""
        self._store.commit(self._random.permutation(self._store.reserve(UNROLLS)))

    def _write_rows(self) -> None:
        """Touch all memory: pages that were never written would all be one page of zeros."""
        columns, entry = self._store.columns, np.arange(1, UNROLLS + 1)
        nothing, ones = np.zeros(UNROLLS, np.int64), np.ones((UNROLLS, 4), np.float32)
        record = Record(ones[:, 0], np.zeros(UNROLLS, np.uint8), nothing, nothing, nothing, policy_version=nothing)
        output = ModelOutput(torch.zeros(UNROLLS, SPEC.policy_size), torch.zeros(UNROLLS))
        for t in range(columns.rows):
            place = columns.locate(entry, nothing + t, age=nothing)
            columns.write_frames(place.frame, ones)
            columns.write_record(place, record)
            columns.write_output(place, output)

    def _set_priorities(self) -> None:
        for _ in range(UNROLLS // self.batch_size):
            unrolls = self._store.take(self.batch_size, timeout=0)
            assert unrolls is not None
            self._store.prefer(unrolls.ticket, torch.from_numpy(self._random.exponential(size=self.batch_size)))
