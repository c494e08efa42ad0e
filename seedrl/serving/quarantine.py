"""Actors whose session broke a rule wait some seconds for the next one. Knows nothing of gRPC, nor of the rules.

An actor that makes the same mistake in every session, and joins again at once, would otherwise take and free slots as
fast as it can. Its Hello waits instead of being refused, so that a client without a pause between attempts is slowed
down as well. This is a measure against mistakes and not against attackers, who can choose a new instance each time.
"""

import time
from collections.abc import Callable

SECONDS = 5.0  # from the end of the session to the next Welcome
MOST = 1024  # instances; beyond that the oldest is forgotten


class Quarantine:
    """The instances that have to wait. Owned by the server thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}  # by instance, in the order of the times

    def impose(self, instance: str) -> None:
        """Let the next session of this process wait. Clients without an instance never wait: they look all the same."""
        now = self._clock()
        self._until.pop(instance, None)
        while self._until and (len(self._until) >= MOST or self._until[next(iter(self._until))] <= now):
            del self._until[next(iter(self._until))]
        if instance:
            self._until[instance] = now + SECONDS

    def seconds_left(self, instance: str) -> float:
        """Return how long a session of this process has to wait from now."""
        now = self._clock()
        return max(0.0, self._until.get(instance, now) - now)
