"""Writes unrolls: who owns the slot that writes one, and when it is handed over. Knows nothing of models or devices."""

import numpy as np

from seedrl.columns import Record, RowIndices
from seedrl.metrics import DROPPED_UNROLLS, ServingMetrics, Stopwatch
from seedrl.serving.seats import Seats
from seedrl.serving.slots import NOBODY, Indices, Slots, WritePosition
from seedrl.store import Store


class UnrollWriter:
    """Owned by the server thread. `finish_unrolls` has to be true before rows are written."""

    def __init__(self, slots: Slots, seats: Seats, store: Store, metrics: ServingMetrics) -> None:
        self._slots = slots
        self._seats = seats
        self._store = store
        self._columns = store.columns
        self._metrics = metrics
        self._full = np.zeros(0, np.int64)  # slots whose unroll is complete and not handed over yet

    def claim(self, slots: Indices, session_id: int) -> None:
        """Give slots to a session, or to NOBODY; what another session has written there is dropped."""
        taken, rows = self._slots.claim(slots, session_id)
        lost = rows * self._seats.is_trained[taken]
        self._metrics.rows_dropped["partial_unroll"] += int(lost.sum())
        self._metrics.unrolls_dropped["session_ended"] += int(np.count_nonzero(lost))

    def release(self, slots: Indices) -> None:
        """Drop what an ended session has written to its slots and not handed over."""
        self._full = self._full[~np.isin(self._full, slots)]
        self.claim(slots, NOBODY)

    def write(self, at: RowIndices, slots: Indices, position: WritePosition, record: Record) -> None:
        """Write what the host knows of one row of each slot; the device has written the rest, or will."""
        self._columns.write_record(at, record)
        self._slots.advance(slots, record.action)
        full = slots[position.t == self._columns.unroll_length]
        if len(full):
            self._full = full if self._seats.all_trained else self._recycle_untrained(full)

    def _recycle_untrained(self, full: Indices) -> Indices:
        """Let slots that are not trained on continue at the beginning of their own entry; return the other slots."""
        is_trained = self._seats.is_trained[full]
        again = full[~is_trained]
        entries = self._slots.entry[again]
        self._columns.roll(entries, entries)
        self._slots.start_unroll(again, entries, self._columns.overlap)
        return full[is_trained]

    def finish_unrolls(self) -> bool:
        """Hand complete unrolls over and continue in fresh entries; return false while too few are free."""
        while len(self._full):
            fresh = self._store.reserve(len(self._full))
            if not len(fresh):
                return False
            self._hand_over(fresh)
        return True

    def _hand_over(self, fresh: Indices) -> None:
        """Commit as many complete unrolls as there are fresh entries."""
        timer, n = Stopwatch(self._metrics.serving_seconds), len(fresh)
        slots, self._full = self._full[:n], self._full[n:]
        finished = self._slots.entry[slots]
        self._columns.roll(finished, fresh)
        self._slots.start_unroll(slots, fresh, self._columns.overlap)
        self._store.commit(finished)
        self._metrics.unrolls_made += n
        for reason, count in self._store.take_dropped().items():
            self._metrics.unrolls_dropped[reason if reason in DROPPED_UNROLLS else "other"] += count
        timer.lap("record")
