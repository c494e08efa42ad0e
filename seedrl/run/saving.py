"""When checkpoints are written, which of them stay, and which one a run returns to.

Knows nothing of what is in them (snapshot.py) or of how they are written (checkpoint.py), but for their score.
"""

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
        """Return what the run resumes from; None for a new run.

        A damaged checkpoint is reported and set aside, and the one before is used.
        """

        def warn(message: str) -> None:
            self._damaged += 1
            self._say(f"learner: {message}")

        return files.load_newest(self._directory, warn, is_ours=True)

    def begin(self) -> None:
        """Start the interval to the next checkpoint, once the counters are restored and training begins."""
        self._saved = self._clock()
        self._learning.checkpoints_damaged += self._damaged
        self._mark_newest()

    @property
    def is_due(self) -> bool:
        return self._clock() - self._saved > self._config.seconds

    def save(self, take: Callable[[], Checkpoint]) -> Path | None:
        """Write a checkpoint; return where it is. A failure is reported and counted, and training continues."""
        self._saved = self._clock()
        timer, config = Stopwatch(self._learning.learner_seconds), self._config
        began = timer.last
        checkpoint = take()
        steps = checkpoint.state["serving"]["env_steps"]  # acting continues meanwhile: the name is of what it holds
        try:
            saved = save(self._directory, steps, checkpoint, config.keep, config.keep_best, config.milestones)
        except (OSError, RunDirectoryError) as error:
            self._learning.checkpoints_failed += 1
            self.failure = str(error)
            self._say(f"learner: no checkpoint could be written ({error}); the one before is intact")
            return None
        self.failure = ""
        self._mark_newest()
        self._learning.checkpoint_timestamp_seconds = time.time()
        self._learning.checkpoint_seconds.observe(timer.lap("checkpoint") - began)
        return saved

    def roll_back(self) -> str:
        """Make the last good checkpoint the newest; return a description of it.

        No checkpoint is written after an update was skipped, so the newest is good, unless not a single update has
        worked since it was written: then its weights cannot be trained, and the one before is used.
        """
        paths = files.found(self._directory)
        if self._updates_done() == self._good_updates and len(paths) > 1:
            files.set_aside(paths.pop(), "diverged")
        if not paths:
            return "there is no checkpoint yet, so the run would start again from the beginning"
        return f"the last good checkpoint is {paths[-1]}, and the run would resume from there"

    def _mark_newest(self) -> None:
        self._good_updates = self._updates_done()
        paths = files.found(self._directory)
        self.newest = paths[-1].name if paths else ""

    def _updates_done(self) -> int:
        return self._learning.gradient_steps - self._learning.skipped_updates


def save(
    directory: Path, env_steps: int, checkpoint: Checkpoint, keep: int, best: bool = False, milestones: int = 0
) -> Path:
    """Write a checkpoint below `directory`, and only then remove those that are not worth keeping.

    The newest `keep` stay, the one with the highest score if `best`, and the first one after every `milestones` env
    steps unless that is 0.
    """
    saved = files.write(directory, env_steps, checkpoint)
    others = [path for path in files.found(directory) if path != saved]  # an older one may have a later name
    wanted = {*others[max(len(others) - keep + 1, 0) :], *(_best([*others, saved]) if best else ())}
    for old in set(others) - wanted - _milestones(others, milestones):
        files.remove(old)
    return saved


def best_of(directory: Path) -> Path | None:
    """Return the checkpoint with the highest score; None if none has one."""
    return next(iter(_best(files.found(directory))), None)


def _best(paths: list[Path]) -> list[Path]:
    """Return the one with the highest score, the newest of several; an empty list if none has one."""
    scored = [(score, path) for path in paths if (score := files.score_of(path)) is not None]
    return [max(scored)[1]] if scored else []


def _milestones(paths: list[Path], interval: int) -> set[Path]:
    """Return the first one in every interval of env steps, except for the interval that the run begins with."""
    first: dict[int, Path] = {}
    for path in paths if interval else ():
        first.setdefault(int(path.name.partition(".")[0]) // interval, path)
    first.pop(0, None)
    return set(first.values())
