"""The training loop: take a train batch, update, save, publish, until the run is over. Knows nothing of streams.

The learner thread runs it, and so does a rank that only trains. Before each update the processes that train together
have a *round*, in which they agree on what comes next; one process alone agrees with itself.
"""

from collections.abc import Callable
from typing import Protocol

from seedrl.config import StopConfig
from seedrl.errors import Diverged
from seedrl.learning.learner import Publisher
from seedrl.metrics import LearningMetrics, Stopwatch
from seedrl.run.stopping import Progress, Stop, reached_goal
from seedrl.types import Unrolls

POLL_SECONDS = 0.1  # how long to wait for a train batch before looking whether to stop


class Source(Protocol):
    """The source of train batches: the store, or the rank that has it."""

    def wait_for(self, count: int, timeout: float) -> bool: ...

    def take(self, count: int, timeout: float) -> Unrolls | None: ...

    def blank(self, count: int) -> Unrolls: ...


class Trains(Protocol):
    """Changes the weights: the learner, or the stand-in for one in another process."""

    @property
    def skipped_in_a_row(self) -> int: ...

    @property
    def has_diverged(self) -> bool: ...

    def train(self, unrolls: Unrolls) -> None: ...

    def assist(self, blank: Unrolls) -> None: ...

    def publish(self, policy: Publisher) -> None: ...


class Rounds(Protocol):
    """The agreement of the processes that train together. Owned by the thread that trains."""

    @property
    def is_update_due(self) -> bool: ...

    @property
    def is_save_due(self) -> bool: ...

    @property
    def patience(self) -> float:
        """Return the seconds to wait for a train batch before the next round."""
        ...

    @property
    def progress(self) -> Progress:
        """Return how far the run is, over all ranks."""
        ...

    def agree(self, has_batch: bool = False) -> bool:
        """Have a round; return whether training continues."""
        ...

    def stop_if_done(self) -> bool:
        """Ask to stop if the goal is reached; return whether it is."""
        ...


class AloneRounds:
    """One process alone: whatever it wants is agreed."""

    patience = POLL_SECONDS

    def __init__(
        self, stop: Stop, goal: StopConfig, progress: Callable[[], Progress], is_save_due: Callable[[], bool]
    ) -> None:
        self.is_update_due = False
        self._stop = stop
        self._goal = goal
        self._progress = progress
        self._is_save_due = is_save_due

    @property
    def is_save_due(self) -> bool:
        return self._is_save_due()

    @property
    def progress(self) -> Progress:
        return self._progress()

    def agree(self, has_batch: bool = False) -> bool:
        self.is_update_due = has_batch
        return not self._stop.is_set()

    def stop_if_done(self) -> bool:
        return self._stop.ask_if_done(reached_goal(self._goal, self.progress))


class TrainingLoop:
    """Owned by the thread that trains; `is_idle` is for any thread."""

    def __init__(
        self,
        source: Source,
        learner: Trains,
        policy: Publisher,
        rounds: Rounds,
        metrics: LearningMetrics,
        *,
        batch_size: int,
        save: Callable[[], object],
        diverged: Callable[[int], Diverged],
        on_published: Callable[[], None] = lambda: None,
    ) -> None:
        """`diverged` makes the error for that many updates in a row that were not finite."""
        self._source = source
        self._learner = learner
        self._policy = policy
        self._rounds = rounds
        self._metrics = metrics
        self._batch_size = batch_size
        self._save = save
        self._diverged = diverged
        self._on_published = on_published
        self.is_idle = True  # false from before a train batch is taken until its weights are published

    def run(self) -> None:
        """Train until a round decides to stop."""
        while self._agree():
            if self._rounds.is_update_due:
                self.is_idle = False
                self._update()
                self._rounds.stop_if_done()
                self._save_and_publish()
                self.is_idle = True
                self._on_published()

    def _agree(self) -> bool:
        """Wait for a train batch for a while, then have a round; both are time spent waiting for data."""
        timer = Stopwatch(self._metrics.learner_seconds)
        has_batch = self._source.wait_for(self._batch_size, self._rounds.patience)
        goes_on = self._rounds.agree(has_batch)
        timer.lap("wait")
        return goes_on

    def _update(self) -> None:
        timer = Stopwatch(self._metrics.learner_seconds)
        unrolls = self._source.take(self._batch_size, timeout=0)
        timer.lap("gather")
        if unrolls is not None:
            self._learner.train(unrolls)
        else:  # the other ranks have train batches and this one has no actors
            self._learner.assist(self._source.blank(self._batch_size))

    def _save_and_publish(self) -> None:
        """Neither saves nor serves weights while updates are being skipped."""
        learner = self._learner
        if learner.has_diverged:
            raise self._diverged(learner.skipped_in_a_row)
        if learner.skipped_in_a_row:
            return
        if self._rounds.is_save_due:
            self._save()
        learner.publish(self._policy)
