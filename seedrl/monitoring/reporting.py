"""The status of a learner and the gauges of its state, read from its parts on request.

Knows nothing of how they travel or are shown.
"""

import math
import platform
import time
from importlib.metadata import version

from seedrl.algorithms.settings import described
from seedrl.metrics import MOODS, LearnerState, LearningMetrics, ServingMetrics
from seedrl.monitoring.life import Life, Watched
from seedrl.monitoring.recorder import Recorder
from seedrl.monitoring.sampler import Row
from seedrl.serving.sessions import Session
from seedrl.status import SILENT_SECONDS, ActorStatus, Status
from seedrl.version import __version__
from seedrl.wire.security import exposures


class Reporter:
    """Thread-safe, for it only reads; `refresh` is called by one thread at a time, that of the endpoint."""

    def __init__(self, watched: Watched, life: Life, recorder: Recorder) -> None:
        self._watched = watched
        self._life = life
        self._recorder = recorder
        packages = {name: version(name) for name in ("torch", "grpcio")}
        self.state = LearnerState(build_info={"version": __version__, "python": platform.python_version(), **packages})

    def status(self) -> Status:
        watched, config = self._watched, self._watched.config
        return Status(
            state=self._state(),
            version=__version__,
            env=config.env.id,
            device=watched.device,
            run_dir=str(watched.run_directory.path),
            address=self._life.listen,
            metrics_address=self._life.pages,
            goal_env_steps=config.stop.env_steps,
            goal_return=config.stop.return_mean_100,
            row=numbers_in(self._recorder.row),
            verdict=self._recorder.verdict,
            learning=self._recorder.learning,
            trouble=trouble(watched.serving, watched.learning),
            actors=self._actors(),
            rank=watched.identity.rank,
            ranks=watched.identity.world_size,
            node=watched.identity.node,
            algorithm=self._life.running.algorithm if self._life.running else described(config.algorithm),
        )

    def _state(self) -> str:
        """Return the phase of the learner; paused while all of its actors are."""
        state, sessions = self._life.state, list(self._watched.sessions.open.values())
        is_paused = bool(sessions) and all(session.is_paused for session in sessions)
        return "paused" if state == "running" and is_paused else state

    def refresh(self) -> None:
        """Bring the gauges of `state` up to date."""
        self._refresh_run()
        self._refresh_serving()
        self._refresh_store()

    def _actors(self) -> list[ActorStatus]:
        """Return the actors, silent ones first and then the slowest."""
        now, newest = time.monotonic(), self._life.policy_version
        actors = [actor_status(session, newest, now) for session in list(self._watched.sessions.open.values())]
        return sorted(actors, key=lambda actor: (actor.silent_seconds < SILENT_SECONDS, -actor.round_trip_seconds))

    def _refresh_run(self) -> None:
        state, watched, config = self.state, self._watched, self._watched.config
        mean, eval_mean = watched.serving.return_mean_100, watched.serving.eval_return_mean_100
        state.run_info = {
            "env": config.env.id,
            "model": config.model.name,
            "algorithm": config.algorithm.name,
            "device": watched.device,
            "run_dir": str(watched.run_directory.path),
            **{name: str(value) for name, value in watched.identity._asdict().items()},
        }
        state.ready = float(self._life.state == "running")
        state.insecure = float(bool(exposures(config)))
        state.frames = watched.serving.env_steps * config.env.frame_skip
        state.return_mean = math.nan if mean is None else mean
        state.eval_return_mean = math.nan if eval_mean is None else eval_mean
        state.return_quantile |= watched.serving.return_quantiles()
        state.length_quantile |= watched.serving.length_quantiles()
        state.reward_per_step = self._recorder.row.get("reward_per_step", math.nan)
        state.learning = {mood: float(mood == self._recorder.learning.mood) for mood in MOODS}
        state.checkpoint_interval_seconds = config.checkpoint.seconds

    def _refresh_serving(self) -> None:
        state, sessions, config = self.state, self._watched.sessions, self._watched.config
        actors = self._actors()
        state.open = float(sessions.is_open)
        state.sessions_open, state.desired_actors = len(actors), self._recorder.autoscaler.desired
        state.sessions_paused = sum(session.is_paused for session in list(sessions.open.values()))
        state.groups = self._recorder.groups
        state.slots_taken, state.slots_limit = sessions.slots_taken, config.serving.max_slots
        state.waiting_rows, state.batch_rows_limit = self._watched.batcher.waiting_rows, config.serving.max_rows
        state.actor_slowest_round_trip_seconds = max((each.round_trip_seconds for each in actors), default=0.0)
        state.actor_longest_silence_seconds = max((each.silent_seconds for each in actors), default=0.0)

    def _refresh_store(self) -> None:
        state, running = self.state, self._life.running
        if running is not None:
            state.policy_version = running.policy.version
            state.store_unrolls, state.store_capacity = running.store.ready, running.store.capacity
            state.store_bytes = running.store_bytes
            row = self._recorder.row
            state.store_limited = {side: row.get(f"limit/{side}", 0.0) for side in state.store_limited}


def numbers_in(row: Row) -> dict[str, float]:
    """Return what JSON and browsers can read as a number."""
    return {name: value for name, value in row.items() if isinstance(value, int | float) and math.isfinite(value)}


def trouble(serving: ServingMetrics, learning: LearningMetrics) -> dict[str, int]:
    """Return what was dropped, skipped or refused, by description; nothing that is zero."""
    counts = {
        "updates skipped: loss or gradient not finite": learning.skipped_updates,
        "checkpoints that could not be written": learning.checkpoints_failed,
        "checkpoints found damaged": learning.checkpoints_damaged,
        "events that callbacks did not see": learning.callback_events_dropped,
        "calls of callbacks that failed": learning.callback_failures,
        "sessions after environments had failed": serving.actors_env_failures,
        **{f"rows dropped: {reason}": count for reason, count in serving.rows_dropped.items()},
        **{f"unrolls dropped: {reason}": count for reason, count in serving.unrolls_dropped.items()},
        **{f"actors refused: {reason}": count for reason, count in serving.sessions_refused.items()},
        **{f"sessions evicted: {reason}": count for reason, count in serving.sessions_evicted.items()},
    }
    return {description: count for description, count in counts.items() if count}


def actor_status(session: Session, policy_version: int, now: float) -> ActorStatus:
    reports, traffic = session.reports, session.traffic
    recent = reports.recent
    busy = recent.wait_seconds + recent.env_seconds
    return ActorStatus(
        name=session.name,
        session=session.id,
        peer=session.peer,
        transport=traffic.transport,
        envs=len(session.lease.slots),
        steps=reports.newest.steps,
        steps_per_second=recent.steps / reports.recent_seconds if reports.recent_seconds else 0.0,
        round_trip_seconds=recent.round_trip_seconds / recent.requests if recent.requests else 0.0,
        wait_fraction=recent.wait_seconds / busy if busy else 0.0,
        policy_lag=0 if session.policy_version is None else max(0, policy_version - session.policy_version),
        reconnects=reports.newest.reconnects,
        connected_seconds=now - traffic.joined,
        silent_seconds=session.silence,
    )
