"""When checkpoints are written, which stay, and which one a run goes back to. Knows nothing of what is in them."""

import time
from collections.abc import Callable
from pathlib import Path

from seedrl.config import CheckpointConfig
from seedrl.errors import RunDirectoryError
from seedrl.metrics import LearningMetrics, Stopwatch
from seedrl.run import checkpoint as files
from seedrl.run.checkpoint import Checkpoint


class Saver:
    """Owned by the learner thread, and by the main thread before that begins and once it has ended."""

    def __init__(
        self,
        config: CheckpointConfig,
        directory: Path,
        learning: LearningMetrics,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._directory = directory
        self._learning = learning
        self._say = say
        self._clock = clock
        self._saved = clock()
        self._damaged = 0  # found by `load`
        self._good_updates = 0  # when the newest was written
        self.newest = ""  # its name; empty for none
        self.failure = ""  # why the latest one could not be written; empty if it was written

    def load(self) -> Checkpoint | None:
        """What the run goes on from; None for a new one. A damaged one is said, set aside, and the one before used."""

        def warn(words: str) -> None:
            self._damaged += 1
            self._say(f"learner: {words}")

        return files.load_newest(self._directory, warn, is_ours=True)

    def begin(self) -> None:
        """The counters are those of the checkpoint, if there is one, and training begins."""
        self._saved = self._clock()
        self._learning.checkpoints_damaged += self._damaged
        self._mark_newest()

    @property
    def is_due(self) -> bool:
        return self._clock() - self._saved > self._config.seconds

    def save(self, take: Callable[[], Checkpoint]) -> None:
        """Writes a checkpoint. If that fails it is said and counted, the one before stays, and training goes on."""
        self._saved = self._clock()
        timer, config = Stopwatch(self._learning.learner_seconds), self._config
        began = timer.last
        checkpoint = take()
        steps = checkpoint.state["serving"]["env_steps"]  # acting goes on meanwhile: its name says what it holds
        try:
            files.save(self._directory, steps, checkpoint, config.keep, config.keep_best, config.milestones)
        except (OSError, RunDirectoryError) as error:
            self._learning.checkpoints_failed += 1
            self.failure = str(error)
            self._say(f"learner: no checkpoint could be written ({error}); the one before is intact")
            return
        self.failure = ""
        self._mark_newest()
        self._learning.checkpoint_timestamp_seconds = time.time()
        self._learning.checkpoint_seconds.observe(timer.lap("checkpoint") - began)

    def roll_back(self) -> str:
        """Makes the last good checkpoint the newest; says which that is.

        None was written since an update was last skipped, so it is the newest, unless not one update has worked since:
        then those very weights cannot be trained, and the one before is.
        """
        paths = files.found(self._directory)
        if self._updates_done() == self._good_updates and len(paths) > 1:
            files.set_aside(paths.pop(), "diverged")
        if not paths:
            return "there is no checkpoint yet, so the run would begin anew"
        return f"the last good checkpoint is {paths[-1]}, and the run would go on from there"

    def _mark_newest(self) -> None:
        self._good_updates = self._updates_done()
        paths = files.found(self._directory)
        self.newest = paths[-1].name if paths else ""

    def _updates_done(self) -> int:
        return self._learning.updates - self._learning.skipped_updates
