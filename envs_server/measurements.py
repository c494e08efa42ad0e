"""The measurements that an actor reports to its learner. Knows nothing of streams."""

import time

from seedrl.metrics import ActorMetrics
from seedrl.wire.messages import Report


class Measurements:
    """The actor's metrics, and what they were when the session began. Owned by the thread that sends."""

    def __init__(self, metrics: ActorMetrics) -> None:
        self.metrics = metrics
        self._before = _measured(metrics)

    def report(self) -> Report:
        """Return what was measured since the session began."""
        return _measured(self.metrics).since(self._before)._replace(reconnects=self._before.reconnects)


def _measured(metrics: ActorMetrics) -> Report:
    """Return what was measured since the actor started."""
    trips = metrics.actor_round_trip_seconds
    return Report(
        steps=metrics.actor_steps,
        env_seconds=metrics.actor_env_seconds,
        wait_seconds=metrics.actor_wait_seconds,
        requests=trips.count,
        round_trip_seconds=trips.sum,
        cpu_seconds=time.process_time(),
        reconnects=metrics.actor_sessions,
    )
