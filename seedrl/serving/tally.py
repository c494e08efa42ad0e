"""Counts what batches did: rows, steps, rewards and the episodes that end. Knows nothing of models or devices."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from seedrl.metrics import ServingMetrics
from seedrl.serving.league import League
from seedrl.serving.seats import Seats
from seedrl.serving.sessions import Request
from seedrl.serving.slots import FinishedEpisodes, Slots
from seedrl.serving.staging import HostBatch


class Tally:
    """Owned by the server thread."""

    def __init__(
        self,
        slots: Slots,
        seats: Seats,
        metrics: ServingMetrics,
        league: League | None,
        on_episodes: Callable[[FinishedEpisodes], None],
        on_evaluated: Callable[[FinishedEpisodes], None],
    ) -> None:
        """`on_episodes` is called with episodes that end in seats that are trained on, `on_evaluated` with others."""
        self._slots = slots
        self._seats = seats
        self._metrics = metrics
        self._league = league  # if some seats are those of opponents
        self._on_episodes = on_episodes
        self._on_evaluated = on_evaluated

    def count(self, batch: HostBatch, reset: NDArray[np.bool_]) -> None:
        """Count the rows of a batch that was recorded."""
        finished = self._slots.count_episodes(batch.slots, batch.reward, batch.flags)
        metrics = self._metrics
        rows = len(batch.slots)
        steps = rows - int(np.count_nonzero(reset))
        if not self._seats.all_trained:
            finished = self._count_untrained(finished)
            untrained = batch.slots[~self._seats.is_trained[batch.slots] & ~reset]
            opponents = int(np.count_nonzero(self._seats.is_opponent[untrained]))
            metrics.opponent_steps += opponents
            metrics.eval_steps += len(untrained) - opponents
            steps -= len(untrained)
            batch = batch._replace(reward=batch.reward * self._seats.is_trained[batch.slots])
        if len(finished.returns):
            self._count_finished(finished)
        metrics.env_steps += steps
        metrics.reward_sum += float(batch.reward.sum(dtype=np.float64))
        metrics.rows += rows
        metrics.batches += 1
        metrics.batch_rows.observe(rows)

    def _count_finished(self, finished: FinishedEpisodes) -> None:
        metrics = self._metrics
        metrics.returns.extend(finished.returns.tolist())
        metrics.lengths.extend(finished.lengths.tolist())
        metrics.episode_return.observe_all(finished.returns)
        metrics.episode_length.observe_all(finished.lengths)
        metrics.episodes += len(finished.returns)
        self._on_episodes(finished)

    def _count_untrained(self, finished: FinishedEpisodes) -> FinishedEpisodes:
        """Count games against opponents and episodes of evaluation; return those of seats that are trained on."""
        if self._league is not None:
            finished = finished.where(~self._seats.is_opponent[finished.slots])
            self._league.finish(finished)
        is_trained = self._seats.is_trained[finished.slots]
        if is_trained.all():
            return finished
        own, metrics = finished.where(~is_trained), self._metrics
        metrics.eval_returns.extend(own.returns.tolist())
        metrics.eval_return.observe_all(own.returns)
        metrics.eval_length.observe_all(own.lengths)
        metrics.eval_episodes += len(own.returns)
        self._on_evaluated(own)
        return finished.where(is_trained)

    def count_answers(self, requests: list[Request], version: int, now: float) -> None:
        """Note when requests were answered, and by which policy."""
        for request in requests:
            request.session.policy_version = version
            self._metrics.act_latency_seconds.observe(now - request.arrived)
