"""Decides whether the actors of this rank deliver rows, so that other ranks wait for its train batch. Knows no votes.

Environments may take minutes to make, actors may be paused for hours or hang in a step, and training must not stall on
all ranks meanwhile.
"""

import time
from collections.abc import Callable

from seedrl.metrics import ServingMetrics
from seedrl.serving.batcher import Batcher
from seedrl.serving.sessions import Request, SessionTable

QUIET_SECONDS = 5.0  # without a row until the actors of a rank count as idle


class ActorActivity:
    """Owned by the thread that has rounds. It reads sessions and counters, which the server thread owns."""

    def __init__(
        self,
        sessions: SessionTable,
        batcher: Batcher[Request],
        metrics: ServingMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sessions = sessions
        self._batcher = batcher
        self._metrics = metrics
        self._clock = clock
        self._rows = metrics.rows  # answered so far, a resumed run's included
        self._active_at = float("-inf")

    def is_idle(self) -> bool:
        """Return whether no actor is connected, ready and unpaused, or none has sent a row for `QUIET_SECONDS`.

        Rows that wait for their actions count as sent: the store may be full until the next update.
        """
        now, rows = self._clock(), self._metrics.rows
        if rows != self._rows or self._batcher.waiting_rows:
            self._rows, self._active_at = rows, now
        is_expected = any(each.has_joined and not each.is_paused for each in list(self._sessions.open.values()))
        return not is_expected or now - self._active_at > QUIET_SECONDS
