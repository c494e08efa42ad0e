"""What people see of a running learner: rows, history, verdict, status, pages. Knows nothing of how it works inside."""

import contextlib
import json
import math
import platform
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from seedrl import __version__
from seedrl.config import LearnerConfig
from seedrl.metrics import LearnerState, LearningMetrics, ServingMetrics
from seedrl.monitoring.autoscale import Autoscaler
from seedrl.monitoring.diagnosis import diagnose
from seedrl.monitoring.endpoint import Endpoint, Page
from seedrl.monitoring.exposition import CONTENT_TYPE, Exposition
from seedrl.monitoring.history import History
from seedrl.monitoring.page import live_page
from seedrl.monitoring.plots import draw_curve
from seedrl.monitoring.sampler import Row, Sampler, Totals
from seedrl.monitoring.sinks import Sinks
from seedrl.policy import Policy
from seedrl.run.directory import RunDirectory
from seedrl.run.identity import ALONE, Identity
from seedrl.run.stopping import Progress
from seedrl.serving.batch_loop import BatchLoop
from seedrl.serving.batcher import Batcher
from seedrl.serving.sessions import Request, Session, SessionTable
from seedrl.status import SILENT_SECONDS, ActorStatus, Status, Verdict
from seedrl.store import Store
from seedrl.trained.card import write_card
from seedrl.wire.security import exposures

ROW_SECONDS = 5.0  # between rows of metrics.jsonl
EARLY_SECONDS = 60.0  # every look is written down until then, so that a short run leaves a curve, too
LOOKS = 10  # that a row covers
WEDGED_SECONDS = 60.0  # without a batch, although somebody waits for one
PROBES = ("/healthz", "/readyz")  # who asks them wants to know about now


class Monitor:
    """`look` and `close` belong to the main thread; `status` and the pages are for any thread."""

    def __init__(
        self,
        config: LearnerConfig,
        run_directory: RunDirectory,
        serving: ServingMetrics,
        learning: LearningMetrics,
        sessions: SessionTable,
        batcher: Batcher[Request],
        say: Callable[[str], None],
        desired_before: int = 0,  # actors, by the process before this one
        identity: Identity = ALONE,
        progress: Callable[[], Progress | None] = lambda: None,
    ) -> None:
        """`progress` is that of all ranks, if this one is to show it."""
        self._config = config
        self._identity = identity
        self._progress = progress
        self._run_dir = str(run_directory.path)
        self._serving = serving
        self._learning = learning
        self._sessions = sessions
        self._batcher = batcher
        self._metrics_file = run_directory.metrics
        self._sinks = Sinks(run_directory, config, say)
        self._history = History()
        self._looks: deque[Totals] = deque(maxlen=LOOKS)
        self._row: Row = {}
        self._verdict = Verdict()
        self._demand = Autoscaler(config, desired_before)
        self._sampler: Sampler | None = None
        self._state = LearnerState(
            build_info={
                "version": __version__,
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "grpcio")},
            }
        )
        self._exposition = Exposition(serving, learning, self._state, refresh=self._refresh)
        self._endpoint = (
            Endpoint(config.metrics, self._pages(), on_error=say, unkept=PROBES) if config.metrics else None
        )
        self.is_ready = False  # set by the server thread, once it is warmed up
        self.is_draining = False  # set by whoever asks the learner to stop
        self.device = ""
        self.listen = ""  # where actors find the learner
        self.address = ""  # of the endpoint; empty for none

    def start(self) -> None:
        """Metrics can be asked for from now on. Raises ConfigError if the address is taken."""
        if self._endpoint is not None:
            self.address = self._endpoint.start()

    def begin(self, store: Store, policy: Policy, batches: BatchLoop, seconds_before: float) -> None:
        """The parts are built, and serving and training begin."""
        self._store, self._policy, self._batches = store, policy, batches
        sampler = Sampler(
            self._config, self._serving, self._learning, self._sessions, seconds_before, progress=self._progress
        )
        now = sampler.totals()
        self._written = now["time"]
        self._looks.append(now)
        self._history.load(self._metrics_file)
        self._sampler = sampler

    def look(self, is_last: bool = False) -> Row:
        """What has happened during the last few looks; now and then it is written down."""
        assert self._sampler is not None
        now = self._sampler.totals()
        row = self._sampler.row(self._looks[0], now)
        self._verdict = diagnose(row, self._config)
        self._row = row = {
            **row,
            "rank": self._identity.rank,
            "ranks": self._identity.world_size,
            "store_fill": self._store.ready / self._store.capacity,
            "bottleneck": self._verdict.bottleneck,
        }
        row["desired_actors"] = self._demand.look(row, self._verdict.bottleneck)
        self._looks.append(now)
        if is_last or now["time"] - self._written >= (ROW_SECONDS if now["time"] > EARLY_SECONDS else 0.0):
            self._written = now["time"]
            self._history.add(row)
            self._sinks.write(row)
        return row

    def close(self, summary: Row, is_coming_back: bool = False) -> None:
        """What takes seconds to draw is left to the end of a run."""
        if self._sampler is not None:
            self.look(is_last=True)
        if self._endpoint is not None:
            self._endpoint.stop()
        self._sinks.close(summary)
        if is_coming_back:
            return
        draw_curve(self._metrics_file.parent)
        with contextlib.suppress(Exception):  # a page for people, and whatever keeps it from being written
            write_card(self._metrics_file.parent)

    # For any thread.

    @property
    def desired_actors(self) -> int:
        """That the learner could use."""
        return self._demand.desired

    @property
    def state(self) -> str:
        return "draining" if self.is_draining else "running" if self.is_ready else "waiting"

    @property
    def silent_seconds(self) -> float:
        """How long somebody has waited for a batch, if nobody has had one meanwhile."""
        is_expected = self._sampler is not None and not self.is_draining  # batches end before the last checkpoint
        return time.monotonic() - self._batches.alive_at if is_expected else 0.0

    @property
    def is_alive(self) -> bool:
        return self.silent_seconds <= WEDGED_SECONDS

    def status(self) -> Status:
        config = self._config
        now = time.monotonic()
        version = self._policy.version if self._sampler else 0
        actors = [actor_status(session, version, now) for session in list(self._sessions.open.values())]
        actors.sort(key=lambda actor: (actor.silent_seconds < SILENT_SECONDS, -actor.round_trip_seconds))
        return Status(
            state=self.state,
            version=__version__,
            env=config.env.id,
            device=self.device,
            run_dir=self._run_dir,
            address=self.listen,
            metrics_address=self.address,
            goal_env_steps=config.stop.env_steps,
            goal_return=config.stop.return_mean_100,
            row=numbers_in(self._row),
            verdict=self._verdict,
            trouble=trouble(self._serving, self._learning),
            actors=actors,
            rank=self._identity.rank,
            ranks=self._identity.world_size,
            node=self._identity.node,
        )

    def _pages(self) -> dict[str, Callable[[], Page]]:
        return {
            "/": live_page,
            "/metrics": lambda: Page(self._exposition.text(), CONTENT_TYPE),
            "/status.json": lambda: _json(asdict(self.status())),
            "/history.json": lambda: _json({"rows": self._history.rows()}),
            "/healthz": self._healthz,
            "/readyz": self._readyz,
        }

    def _healthz(self) -> Page:
        if self.is_alive:
            return Page(b"alive\n")
        return Page(f"rows wait and no batch has run for {self.silent_seconds:.0f} s\n".encode(), status=503)

    def _readyz(self) -> Page:
        return Page(f"{self.state}\n".encode(), status=200 if self.state == "running" else 503)

    def _refresh(self) -> None:
        """Runs in the endpoint's thread, for one look at a time."""
        state, config, status = self._state, self._config, self.status()
        mean, eval_mean = self._serving.return_mean_100, self._serving.eval_return_mean_100
        state.run_info = {
            "env": config.env.id,
            "model": config.model.name,
            "device": self.device,
            "run_dir": self._run_dir,
            **{name: str(value) for name, value in self._identity._asdict().items()},
        }
        state.ready = float(status.state == "running")
        state.open = float(self._sessions.is_open)
        state.insecure = float(bool(exposures(config)))
        state.frames = self._serving.env_steps * config.env.frame_skip
        state.return_mean = math.nan if mean is None else mean
        state.eval_return_mean = math.nan if eval_mean is None else eval_mean
        state.sessions_open, state.desired_actors = len(status.actors), self.desired_actors
        state.slots_taken, state.slots_limit = self._sessions.slots_taken, config.serving.max_slots
        state.waiting_rows, state.batch_rows_limit = self._batcher.waiting_rows, config.serving.max_rows
        state.checkpoint_interval_seconds = config.checkpoint.seconds
        state.actor_slowest_round_trip_seconds = max((each.round_trip_seconds for each in status.actors), default=0.0)
        state.actor_longest_silence_seconds = max((each.silent_seconds for each in status.actors), default=0.0)
        if self._sampler is not None:
            state.groups = self._sampler.groups
            state.policy_version = self._policy.version
            state.store_unrolls, state.store_capacity = self._store.ready, self._store.capacity
            state.store_bytes = self._store.columns.nbytes


def numbers_in(row: Row) -> dict[str, float]:
    """What JSON and browsers can take as a number."""
    return {name: value for name, value in row.items() if isinstance(value, int | float) and math.isfinite(value)}


def _json(content: dict[str, Any]) -> Page:
    return Page(json.dumps(content).encode(), "application/json")


def trouble(serving: ServingMetrics, learning: LearningMetrics) -> dict[str, int]:
    """Whatever was dropped, skipped or refused, in words; nothing that is zero."""
    counts = {
        "updates skipped: loss or gradient not finite": learning.skipped_updates,
        "checkpoints that could not be written": learning.checkpoints_failed,
        "checkpoints found damaged": learning.checkpoints_damaged,
        "sessions after environments had failed": serving.actors_env_failures,
        **{f"rows dropped: {reason}": count for reason, count in serving.rows_dropped.items()},
        **{f"unrolls dropped: {reason}": count for reason, count in serving.unrolls_dropped.items()},
        **{f"actors refused: {reason}": count for reason, count in serving.sessions_refused.items()},
        **{f"sessions evicted: {reason}": count for reason, count in serving.sessions_evicted.items()},
    }
    return {words: count for words, count in counts.items() if count}


def actor_status(session: Session, policy_version: int, now: float) -> ActorStatus:
    recent = session.recent
    busy = recent.wait_seconds + recent.env_seconds
    return ActorStatus(
        name=session.name,
        session=session.id,
        peer=session.peer,
        transport=session.transport,
        envs=len(session.slots),
        steps=session.measured.steps,
        steps_per_second=recent.steps / session.recent_seconds if session.recent_seconds else 0.0,
        round_trip_seconds=recent.round_trip_seconds / recent.requests if recent.requests else 0.0,
        wait_fraction=recent.wait_seconds / busy if busy else 0.0,
        policy_lag=0 if session.policy_version is None else max(0, policy_version - session.policy_version),
        reconnects=session.measured.reconnects,
        connected_seconds=now - session.joined,
        silent_seconds=session.silence,
    )
