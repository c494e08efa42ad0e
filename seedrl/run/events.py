"""Makes events for callbacks of what happens in a learner process, and none if no callback wants them.

Knows nothing of how callbacks are called (callbacks.py).
"""

from collections.abc import Callable
from pathlib import Path

from seedrl.metrics import LearningMetrics, ServingMetrics
from seedrl.run.callbacks import Callbacks, Episode, MemberChange, Update
from seedrl.run.stopping import Progress
from seedrl.serving.sessions import Session
from seedrl.serving.slots import FinishedEpisodes


class Events:
    """`start` and `close` belong to the main thread; the others to the thread in which their event is born."""

    def __init__(self, callbacks: Callbacks, serving: ServingMetrics, learning: LearningMetrics) -> None:
        self._serving = serving
        self._learning = learning
        self.start = callbacks.start
        self.close = callbacks.close
        self._on_update = callbacks.listener("on_update")
        self._on_episode = callbacks.listener("on_episode")
        self._on_checkpoint = callbacks.listener("on_checkpoint")
        self._on_member = callbacks.listener("on_member")

    def update(self, progress: Callable[[], Progress]) -> None:
        if self._on_update is not None:
            now, learning = progress(), self._learning
            values = dict(learning.algorithm)
            self._on_update(Update(learning.updates, now.env_steps, now.episodes, now.return_mean, values))

    def episodes(self, finished: FinishedEpisodes, is_evaluation: bool) -> None:
        if self._on_episode is not None:
            steps = self._serving.env_steps
            for episode_return, length in zip(finished.returns.tolist(), finished.lengths.tolist(), strict=True):
                self._on_episode(Episode(episode_return, length, steps, is_evaluation))

    def checkpoint(self, path: Path | None) -> None:
        """Note a checkpoint; none was written if there is no path."""
        if self._on_checkpoint is not None and path is not None:
            self._on_checkpoint(path)

    def member(self, session: Session, has_joined: bool) -> None:
        if self._on_member is not None:
            self._on_member(MemberChange(session.name, session.id, len(session.lease.slots), has_joined))
