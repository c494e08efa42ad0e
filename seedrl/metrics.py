"""Every metric, declared once: kind, unit, label, buckets and meaning. Knows nothing of how metrics are shown.

A metric is a field of one of the groups below; the group names the thread that writes it, and any thread may read it.
Values are plain numbers: an update takes no lock and a tenth of a microsecond. A field `x` is exported as `seedrl_x`, a
counter as `seedrl_x_total` (`monitoring/exposition.py`); docs/metrics.md is generated from here.
"""

import math
import re
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from seedrl.errors import ConfigError

SECONDS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
ROWS = tuple(2.0**power for power in range(13))
UPDATES = (0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0, 100.0, 1000.0)
STEPS = (1.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4, 1e5)
RETURNS = (-1e4, -1e3, -300, -100, -30, -20, -10, -3, -1, 0, 1, 3, 10, 20, 30, 100, 300, 1e3, 3e3, 1e4)

# How the server thread and the learner thread spend their time. Dashboards and the closing lines of a run use the same
# names.
BATCH_STAGES = ("stage", "copy", "forward", "reply", "record")
SERVING_STAGES = ("read", *BATCH_STAGES, "send", "hold", "fill", "idle")
LEARNER_STAGES = ("wait", "gather", "forward", "backward", "optimize", "publish", "checkpoint")

MANY = 32  # values that are worth numpy's overhead
MOST_REPORTED = 32  # values that an algorithm may report
REPORTED_NAME = re.compile(r"[a-z0-9_]+")

REFUSALS = (
    *("unauthenticated", "invalid_message", "mismatch", "not_granted", "too_late", "superseded", "no_capacity"),
    "internal",
)
DROPPED_UNROLLS = ("session_ended", "off_policy", "stale", "unused", "other")
QUANTILES = ("0.1", "0.5", "0.9")
MOODS = ("good", "open", "bad")  # of the verdict on learning
REDIRECTS = ("balance", "closed", "drain", "rebalance")


class Kind(Enum):
    counter = "counter"
    gauge = "gauge"
    histogram = "histogram"
    info = "info"


@dataclass(frozen=True, slots=True)
class Declaration:
    """The properties of a metric."""

    kind: Kind
    meaning: str
    label: str = ""
    values: tuple[str, ...] = ()  # all values the label can have; empty if they are decided at run time
    buckets: tuple[float, ...] = ()


class Histogram:
    """The number of values below each bound. Written by one thread."""

    __slots__ = ("_bounds_array", "bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._bounds_array = np.array(bounds)
        self.counts = [0] * (len(bounds) + 1)  # the last: beyond all bounds
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: NDArray[Any]) -> None:
        """Observe many values at once: hundreds cost as much as a few dozen one by one."""
        if values.size < MANY:
            for value in values.reshape(-1).tolist():
                self.observe(value)
            return
        found = np.bincount(self._bounds_array.searchsorted(values.reshape(-1)), minlength=len(self.counts))
        self.counts = [before + more for before, more in zip(self.counts, found.tolist(), strict=True)]
        self.sum += float(values.sum())

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return self.sum / count if (count := self.count) else 0.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Histogram) and (self.counts, self.sum) == (other.counts, other.sum)


class ReportedValues(Mapping[str, float]):
    """Gauges whose names are decided at run time, by the code that reports them.

    Written by one thread; any thread may read, because a report replaces the content as a whole. There are at most
    `MOST_REPORTED` names, so the number of exported series stays bounded.
    """

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def update(self, values: Mapping[str, float]) -> None:
        """Set some values and keep the others. Raise ConfigError if a name cannot be exported."""
        merged = {**self._values, **values}
        wrong = [name for name in values if not REPORTED_NAME.fullmatch(name)]
        if wrong:
            raise ConfigError(f"the algorithm reports {wrong[0]!r}; a name consists of a-z, 0-9 and _ only")
        if len(merged) > MOST_REPORTED:
            raise ConfigError(f"the algorithm reports {len(merged)} values; at most {MOST_REPORTED} can be shown")
        self._values = merged

    def __getitem__(self, name: str) -> float:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Stopwatch:
    """Adds the time since the previous lap to a stage. Owned by the thread whose time it measures."""

    __slots__ = ("_spent", "last")

    def __init__(self, spent: dict[str, float]) -> None:
        self._spent = spent
        self.last = time.monotonic()

    def lap(self, stage: str) -> float:
        """End a lap; return the present time."""
        now = time.monotonic()
        self._spent[stage] += now - self.last
        self.last = now
        return now


def counter(meaning: str) -> Any:
    """Declare a number that only grows, also over restarts of a run."""
    return field(default=0, metadata={"metric": Declaration(Kind.counter, meaning)})


def counters(label: str, values: tuple[str, ...], meaning: str) -> Any:
    """Declare a counter for each value of a label. All exist from the start, so that the first event is a rise."""
    declaration = Declaration(Kind.counter, meaning, label, values)
    return field(default_factory=lambda: dict.fromkeys(values, 0), metadata={"metric": declaration})


def gauge(meaning: str, at_first: float = 0.0) -> Any:
    """Declare a number that goes up and down."""
    return field(default=at_first, metadata={"metric": Declaration(Kind.gauge, meaning)})


def gauges(label: str, values: tuple[str, ...], meaning: str) -> Any:
    """Declare a gauge for each value of a label; they are NaN as long as there is no number."""
    declaration = Declaration(Kind.gauge, meaning, label, values)
    return field(default_factory=lambda: dict.fromkeys(values, math.nan), metadata={"metric": declaration})


def reported(label: str, meaning: str) -> Any:
    """Declare gauges whose label values are decided at run time."""
    return field(default_factory=ReportedValues, metadata={"metric": Declaration(Kind.gauge, meaning, label)})


def histogram(buckets: tuple[float, ...], meaning: str) -> Any:
    declaration = Declaration(Kind.histogram, meaning, buckets=buckets)
    return field(default_factory=lambda: Histogram(buckets), metadata={"metric": declaration})


def info(meaning: str) -> Any:
    """Declare facts in words, exported as labels of a constant 1."""
    return field(default_factory=dict, metadata={"metric": Declaration(Kind.info, meaning)})


@dataclass
class ServingMetrics:
    """Written by the server thread."""

    env_steps: int = counter(
        "Transitions of environments without those of evaluation and opponents: rows that are not resets"
    )
    eval_steps: int = counter("Transitions of environments for evaluation, which are never trained on")
    opponent_steps: int = counter("Transitions of opponents, entries of the bank, which are never trained on")
    rows: int = counter("Rows answered, resets included")
    batches: int = counter("Forward passes of inference")
    batch_rows: Histogram = histogram(ROWS, "Rows of a batch")
    serving_seconds: dict[str, float] = counters(
        "stage",
        SERVING_STAGES,
        "Time of the server thread: read (decoding requests); stage, copy, forward, reply, record (a batch); send "
        "(sending answers); hold (actors are slowed because the learner is behind), fill (waiting for "
        "serving.min_rows), idle",
    )
    queue_wait_seconds: Histogram = histogram(SECONDS, "Time a request waits before its batch runs")
    queue_seconds: dict[str, float] = counters(
        "cause",
        ("hold", "fill", "busy"),
        "Time that requests waited, added up over requests, by cause: hold (the learner is behind), fill (for "
        "serving.min_rows), busy (another batch ran)",
    )
    act_latency_seconds: Histogram = histogram(SECONDS, "Time from reading a request to its answer")
    episodes: int = counter("Episodes finished")
    episode_return: Histogram = histogram(RETURNS, "Undiscounted, unclipped return of finished episodes")
    episode_length: Histogram = histogram(STEPS, "Steps of finished episodes")
    eval_episodes: int = counter("Evaluation episodes finished; they are not counted as episodes")
    eval_return: Histogram = histogram(RETURNS, "Undiscounted, unclipped return of finished evaluation episodes")
    eval_length: Histogram = histogram(STEPS, "Steps of finished evaluation episodes")
    games: dict[str, int] = counters(
        "result", ("won", "drawn", "lost"), "Games of the policy in training against entries of the bank, by result"
    )
    elo: float = gauge("Elo rating of the policy in training, that of the first snapshot being 1000", math.nan)
    win_rate: float = gauge("Recent score against the entries of the bank, draws being half a win", math.nan)
    bank_entries: float = gauge("Policies of the bank: snapshots, and opponents from other runs")
    unrolls_made: int = counter("Unrolls finished and handed to the learner")
    unrolls_dropped: dict[str, int] = counters(
        "reason",
        DROPPED_UNROLLS,
        "Unrolls that were never trained on, or not as often as they could have been: session_ended (before they were "
        "finished), off_policy (left over from an earlier policy of an on-policy run), stale (older than "
        "store.max_staleness), unused (made room in a replay memory before they were picked), other (dropped by a "
        "selector of your own)",
    )
    rows_dropped: dict[str, int] = counters(
        "reason",
        ("session_ended", "partial_unroll"),
        "Rows that are not trained on: session_ended (the row waited for inference when its session ended), "
        "partial_unroll (the row was recorded in an unroll that was dropped)",
    )
    sessions_joined: int = counter("Sessions that were welcomed")
    sessions_left: int = counter("Sessions that ended because the actor left or its stream broke")
    sessions_refused: dict[str, int] = counters(
        "reason", REFUSALS, "Actors refused before they joined; unauthenticated: calls of any kind"
    )
    sessions_evicted: dict[str, int] = counters("reason", REFUSALS, "Sessions that the learner ended")
    sessions_redirected: dict[str, int] = counters(
        "reason",
        REDIRECTS,
        "Actors redirected to another endpoint: balance (new ones, which are better served there), closed (new ones, "
        "because this endpoint accepts none), drain (open sessions, on request), rebalance (open sessions, because "
        "there are too many). None of them counts as left",
    )
    received_bytes: dict[str, int] = counters(
        "transport", ("message", "memory"), "Observations, rewards and flags received, in messages or shared memory"
    )
    sent_bytes: int = counter("Actions sent")
    actors_steps: int = counter("Rows sent, as actors report them")
    actors_requests: int = counter("Requests answered, as actors report them")
    actors_round_trip_seconds: float = counter(
        "Time from sending a request to its answer, as actors measure it, added up"
    )
    actors_env_seconds: float = counter("Time actors waited for environments, added up")
    actors_wait_seconds: float = counter("Time actors had no environment stepping and waited for actions, added up")
    actors_cpu_seconds: float = counter("CPU time of actors, added up")
    actors_reconnects: int = counter("Sessions of actors that had an earlier session")
    actors_env_failures: int = counter("Sessions of actors whose environments had failed in the previous session")
    reward_sum: float = 0.0  # of all transitions that `env_steps` counts, in this process
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=100))  # of the last finished episodes
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=100))
    eval_returns: deque[float] = field(default_factory=lambda: deque(maxlen=100))  # the same, of evaluation

    @property
    def return_mean_100(self) -> float | None:
        return _mean(self.returns)

    @property
    def eval_return_mean_100(self) -> float | None:
        return _mean(self.eval_returns)

    def return_quantiles(self) -> dict[str, float]:
        """Return true quantiles of the last 100 returns, by their share; nothing before the first episode ends."""
        return quantiles(self.returns)

    def length_quantiles(self) -> dict[str, float]:
        """Return the same of the lengths of episodes."""
        return quantiles(self.lengths)

    @property
    def batch_mean(self) -> float:
        return self.rows / self.batches if self.batches else 0.0


def quantiles(values: deque[Any]) -> dict[str, float]:
    """Return quantiles of values that another thread may add to meanwhile."""
    seen = values.copy()
    if not seen:
        return {}
    found = np.quantile(np.array(seen, np.float64), [float(share) for share in QUANTILES])
    return dict(zip(QUANTILES, found.tolist(), strict=True))


def _mean(values: deque[float]) -> float | None:
    """Return the mean of values that another thread may add to meanwhile; None if there are none."""
    seen = values.copy()
    return sum(seen) / len(seen) if seen else None


@dataclass
class LearningMetrics:
    """Written by the learner thread."""

    updates: int = counter("Updates: train batches trained on, each in one gradient step or more")
    gradient_steps: int = counter("Gradient steps, skipped ones included")
    skipped_updates: int = counter("Gradient steps skipped because the loss or the gradient was not finite")
    trained_steps: int = counter("Steps trained on")
    unrolls_trained: int = counter("Unrolls taken from the store to be trained on")
    unroll_uses: int = counter(
        "Unrolls of all gradient steps, so one counts each time it is trained on; over seedrl_unrolls_made_total it is "
        "the reuse"
    )
    learner_seconds: dict[str, float] = counters(
        "stage",
        LEARNER_STAGES,
        "Time of the learner thread: wait (for unrolls), gather, forward (loss included), backward (clipping "
        "included), optimize, publish, checkpoint. A CUDA device may still work while the thread is in the next stage",
    )
    policy_lag: Histogram = histogram(UPDATES, "Updates between acting and training, for every step trained on")
    publish_lag_seconds: Histogram = histogram(
        SECONDS, "Time from the end of an optimizer step until its weights are served"
    )
    algorithm: ReportedValues = reported("value", "Numbers that the algorithm reports about a recent update")
    grad_norm: float = gauge("Norm of the gradient before clipping; NaN before the first update", math.nan)
    learning_rate: float = gauge("Step size of the optimizer; NaN before the first update", math.nan)
    checkpoint_seconds: Histogram = histogram(SECONDS, "Time to write a checkpoint")
    checkpoints_failed: int = counter("Checkpoints that could not be written")
    checkpoints_damaged: int = counter("Checkpoints found damaged when the run was resumed; an earlier one was used")
    callback_events_dropped: int = counter(
        "Events that callbacks never saw, because too many waited or the run ended"
    )  # these two are written by threads that have events, under a lock, and by the thread of callbacks
    callback_failures: int = counter("Calls of callbacks that raised an exception")
    checkpoint_timestamp_seconds: float = gauge(
        "Unix time at which the newest checkpoint was written; 0 before the first one"
    )

    @property
    def wait_fraction(self) -> float:
        total = sum(self.learner_seconds.values())
        return self.learner_seconds["wait"] / total if total else 0.0


@dataclass
class LearnerState:
    """Read from the parts of the learner for every scrape. Written by the thread of the endpoint."""

    build_info: dict[str, str] = info("Versions: seedrl, python, torch, grpcio")
    run_info: dict[str, str] = info(
        "The run: env, model, algorithm, device and run directory; and the role, rank and node of the process"
    )
    ready: float = gauge("1 while actors are served")
    open: float = gauge(
        "1 while new actors are accepted; seedrl control move sets it to 0, and seedrl control open to 1"
    )
    insecure: float = gauge("1 if the settings allow serving beyond this machine without TLS or token")
    frames: int = counter("Simulator frames: env_steps times env.frame_skip")
    return_mean: float = gauge("Mean return of the last 100 episodes; NaN before the first one")
    eval_return_mean: float = gauge("Mean return of the last 100 evaluation episodes; NaN before the first one")
    return_quantile: dict[str, float] = gauges(
        "quantile", QUANTILES, "Quantiles of the returns of the last 100 episodes; NaN before the first one"
    )
    length_quantile: dict[str, float] = gauges(
        "quantile", QUANTILES, "Quantiles of the lengths of the last 100 episodes; NaN before the first one"
    )
    reward_per_step: float = gauge("Mean reward per step over the last seconds, unclipped; NaN if there was no step")
    learning: dict[str, float] = gauges(
        "mood", MOODS, "1 for the mood of the verdict on learning: good, open (neither, or not known) or bad"
    )
    policy_version: float = gauge("Version of the weights that act")
    sessions_open: float = gauge("Actors connected")
    sessions_paused: float = gauge("Actors connected that seedrl control pause has paused")
    desired_actors: float = gauge(
        "Actors that the learner could use, from how long it waits for data and how long they are held back, within "
        "actors.count and actors.at_most"
    )
    groups: float = gauge(
        "Groups of environments in circulation, which is the number of requests that can be under way at once"
    )
    slots_taken: float = gauge("Slots leased to actors")
    slots_limit: float = gauge("serving.max_slots")
    waiting_rows: float = gauge("Rows waiting for inference")
    batch_rows_limit: float = gauge("serving.max_rows")
    store_unrolls: float = gauge("Finished unrolls waiting to be trained on")
    store_capacity: float = gauge("Finished unrolls that the store can hold")
    store_bytes: float = gauge("Device memory of the store")
    store_limited: dict[str, float] = gauges(
        "side",
        ("filling", "learner", "actors"),
        "Share of the last seconds in which the limiter of a replay memory held this side back; "
        "filling is the learner, until there are store.min_size unrolls",
    )
    checkpoint_interval_seconds: float = gauge("checkpoint.seconds")
    actor_slowest_round_trip_seconds: float = gauge("Mean round trip of the slowest actor, in its latest report")
    actor_longest_silence_seconds: float = gauge("Longest time since the last message of a connected actor")


@dataclass
class ActorMetrics:
    """One actor process, over all of its sessions. Each number has one writer, the main or the sending thread."""

    actor_steps: int = counter("Rows sent")
    actor_requests: dict[str, int] = counters(
        "transport", ("message", "memory"), "Requests sent, with observations in the message or in shared memory"
    )
    actor_env_seconds: float = counter("Time waiting for environments")
    actor_wait_seconds: float = counter(
        "Time in which no environment was stepping because all of them waited for actions"
    )
    actor_round_trip_seconds: Histogram = histogram(SECONDS, "Time from sending a request to its answer")
    actor_sessions: int = counter("Sessions that were welcomed")
    actor_redirects: int = counter("Redirects to other endpoints, including those that were not followed")
    actor_failures: int = counter("Attempts to join, and sessions, that ended in an error")
    actor_env_failures: int = counter("Times that environments raised, hung or sent data that the learner refused")
    actor_connected: float = gauge("1 during a session")


GROUPS: tuple[type, ...] = (ServingMetrics, LearningMetrics, LearnerState, ActorMetrics)
Group = ServingMetrics | LearningMetrics | LearnerState | ActorMetrics


class Metric(NamedTuple):
    """A declared metric and its value: a number, numbers by label, a histogram, or words."""

    name: str  # as exported, without _total
    declaration: Declaration
    value: Any


def declared(group: type) -> Iterator[tuple[str, Declaration]]:
    """Yield (field, declaration) for every metric of a group."""
    for each in fields(group):
        if "metric" in each.metadata:
            yield each.name, each.metadata["metric"]


def metrics_of(group: Group) -> Iterator[Metric]:
    for name, declaration in declared(type(group)):
        yield Metric(f"seedrl_{name}", declaration, getattr(group, name))


def totals_of(group: Group) -> dict[str, Any]:
    """Return everything that only grows, as JSON; a run keeps it over restarts."""
    totals: dict[str, Any] = {}
    for name, declaration in declared(type(group)):
        value = getattr(group, name)
        if declaration.kind is Kind.histogram:
            totals[name] = {"counts": value.counts, "sum": value.sum}
        elif declaration.kind is Kind.counter:
            totals[name] = dict(value) if declaration.label else value
    return totals


def restore_totals(group: Group, totals: dict[str, Any]) -> None:
    """Restore the result of `totals_of`. Metrics that were not saved, or had other labels or buckets, start at zero."""
    for name, declaration in declared(type(group)):
        if name not in totals:
            continue
        saved = totals[name]
        if declaration.kind is Kind.histogram:
            value = getattr(group, name)
            if len(saved["counts"]) == len(value.counts):
                value.counts, value.sum = list(saved["counts"]), saved["sum"]
        elif declaration.label:
            getattr(group, name).update({key: saved[key] for key in declaration.values if key in saved})
        else:
            setattr(group, name, saved)
