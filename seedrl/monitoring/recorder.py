"""Samples a running learner: a row of measurements, the verdicts on it, and what is written down of them.

Knows nothing of who reads the rows.
"""

from collections import deque
from collections.abc import Callable

from seedrl.algorithms.signs import Signs
from seedrl.monitoring.autoscale import Autoscaler
from seedrl.monitoring.diagnosis import diagnose
from seedrl.monitoring.history import History
from seedrl.monitoring.judgement import columns_for, judge
from seedrl.monitoring.life import Life, Watched
from seedrl.monitoring.sampler import Row, Sampler, Totals
from seedrl.monitoring.sinks import Sinks
from seedrl.run.stopping import Progress
from seedrl.selection.base import FILLING, Limits
from seedrl.status import Learning, Mood, Verdict

ROW_SECONDS = 5.0  # between rows of metrics.jsonl
EARLY_SECONDS = 60.0  # every sample is written down until then, so that a short run leaves a curve, too
SAMPLES = 10  # that a row covers


class Recorder:
    """Methods belong to the main thread; any thread may read the newest `row`, `verdict` and `learning`."""

    def __init__(
        self,
        watched: Watched,
        life: Life,
        say: Callable[[str], None],
        desired_before: int,
        progress: Callable[[], Progress | None],
    ) -> None:
        """`desired_before` is the number of actors that the previous process of the run could use."""
        self._watched = watched
        self._life = life
        self._progress = progress
        self._say = say
        self._said: set[str] = set()  # bad verdicts on learning
        self._sinks = Sinks(watched.run_directory, watched.config, say)
        self._sampler: Sampler | None = None  # once the learner runs
        self._window: deque[Totals] = deque(maxlen=SAMPLES)
        self._store_fill: deque[float] = deque(maxlen=SAMPLES)
        self._limits: deque[Limits] = deque(maxlen=SAMPLES)  # of the store
        self._written = 0.0  # when, in seconds of the run
        self.autoscaler = Autoscaler(watched.config, desired_before)
        self.history = History()
        self.row: Row = {}
        self.verdict = Verdict()
        self.learning = Learning()

    def begin(self, seconds_before: float) -> None:
        """Sample from now on. `seconds_before` is what the run has taken in earlier processes."""
        watched = self._watched
        self._sampler = Sampler(
            watched.config, watched.serving, watched.learning, watched.sessions, seconds_before, progress=self._progress
        )
        now = self._sampler.totals()
        self._written = now["time"]
        self._window.append(now)
        self.history.load(watched.run_directory.metrics)

    def sample(self, is_last: bool = False) -> Row:
        """Return what has happened over the last few samples; write it down now and then, and if it is the last."""
        assert self._sampler is not None
        now = self._sampler.totals()
        row = {**self._sampler.row(self._window[0], now), **self._limited()}
        self.verdict = diagnose(row, self._watched.config, self._is_on_policy)
        self.row = row = {**row, **self._about(row)}
        self._window.append(now)
        if is_last or now["time"] - self._written >= (ROW_SECONDS if now["time"] > EARLY_SECONDS else 0.0):
            self._written = now["time"]
            self.history.add(row)
            self._judge()
            self._sinks.write({**row, "learning": self.learning.verdict})
        return {**row, "learning": self.learning.verdict}

    def finish(self) -> Learning:
        """Take the last sample, if the learner ran; return the verdict on the whole run."""
        if self._sampler is not None:
            self.sample(is_last=True)
        return self.learning

    def close(self, summary: Row) -> None:
        """End what is written."""
        self._sinks.close(summary)

    def _judge(self) -> None:
        """Judge the rows so far; each bad verdict is announced once."""
        signs = self._life.running.signs if self._life.running else Signs()
        learning = judge(self.history.rows(columns_for(signs)), self._watched.config, signs)
        if learning.mood is Mood.bad and learning.verdict not in self._said:
            self._said.add(learning.verdict)
            self._say(f"learner: {learning.verdict}: {learning.evidence} {learning.change}")
        self.learning = learning

    @property
    def groups(self) -> int:
        """Return the requests that can be under way at once."""
        return self._sampler.groups if self._sampler else 0

    @property
    def _is_on_policy(self) -> bool:
        return self._life.running is not None and self._life.running.is_on_policy

    def _limited(self) -> Row:
        """Return for how much of the last samples a limiter held each side back; nothing if the store is a queue."""
        if self._life.running is None or self._watched.config.store.select == "fifo":
            return {}
        self._limits.append(self._life.running.store.limits())
        causes = {
            "limit/filling": [limits.learner == FILLING for limits in self._limits],
            "limit/learner": [limits.learner not in ("", FILLING) for limits in self._limits],
            "limit/actors": [limits.actors != "" for limits in self._limits],
        }
        return {name: sum(held) / len(held) for name, held in causes.items()}

    def _about(self, row: Row) -> Row:
        """Return what a row has besides the measurements: the process, its store and the bottleneck."""
        store = self._life.running.store if self._life.running else None
        self._store_fill.append(store.ready / store.capacity if store else 0.0)
        return {
            "on_policy": float(self._is_on_policy),
            "rank": self._watched.identity.rank,
            "ranks": self._watched.identity.world_size,
            "store_fill": sum(self._store_fill) / len(self._store_fill),
            "bottleneck": self.verdict.bottleneck,
            "desired_actors": self.autoscaler.update(row, self.verdict.bottleneck),
        }
