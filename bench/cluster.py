"""Actors, links, ranks and learners as a discrete-event simulation. Knows no measurement: costs are given in seconds.

A group of environments goes round: its actor steps it (one group at a time), its message crosses the rank's link (one
after another), waits to be read and for a batch of the server thread (one thing at a time), and the answer comes back.
After `unroll_length` rows the unrolls of a group are finished; while the store has no room for them no batch runs. The
learner takes train batches; several ranks wait for each other in every update.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

INFINITE = math.inf


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds."""

    step: float  # of an actor, for one step of one group
    message: float = 0.0  # of the server thread, to read a request and to answer it
    row: float = 0.0  # more for each row of it
    batch: float = 0.0  # of the server thread for a batch, the model included
    batch_row: float = 0.0  # more for each row of it
    update: float = 0.0  # of the learner for a train batch
    publish: float = 0.0  # of all ranks, to agree on an update


@dataclass(frozen=True, slots=True)
class Link:
    """Between the actors and a rank. Actions are small: only observations take bandwidth."""

    latency: float = 0.0  # seconds, one way
    bandwidth: float = INFINITE  # bytes per second, of a rank


AT_ONCE = Link()


@dataclass(frozen=True, slots=True)
class Shape:
    actors: int = 1
    ranks: int = 1
    envs: int = 32  # of an actor
    groups: int = 2
    row_bytes: int = 7065
    unroll_length: int = 20
    batch_size: int = 32
    capacity: int = 0  # of a rank's store; 0 for twice batch_size
    max_rows: int = 256

    @property
    def rows(self) -> int:
        """Return the rows of a message."""
        return self.envs // self.groups

    @property
    def room(self) -> int:
        return self.capacity or 2 * self.batch_size


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a simulation, after the warm-up."""

    rows_per_second: float
    latency_mean: float  # seconds from a message to its actions
    latency_p50: float
    latency_p99: float
    policy_lag: float  # updates, mean over all steps trained on
    learner_wait: float  # share of time
    hold: float  # share of time in which the store was full
    server_busy: float  # share of time
    in_flight: float  # messages on their way, mean over time


@dataclass(eq=False, slots=True)
class Group:
    actor: "Actor"
    rank: "Rank"
    rows: int
    sent: float = 0.0
    steps: int = 0  # of its unroll
    versions: int = 0  # of the policy, added up over those


@dataclass(eq=False, slots=True)
class Actor:
    free: float = 0.0  # when it can step the next group


@dataclass(eq=False, slots=True)
class Rank:
    link_free: float = 0.0
    unread: list[Group] = field(default_factory=list)
    waiting: deque[Group] = field(default_factory=deque)
    is_serving: bool = False
    held_since: float | None = None
    finished: deque[list[int]] = field(default_factory=deque)  # [unrolls, their versions added up], no room for them
    ready: deque[list[int]] = field(default_factory=deque)
    stored: int = 0  # unrolls in `ready`
    is_training: bool = False
    trained: bool = False  # its part of the update that all wait for
    idle_since: float = 0.0


@dataclass(slots=True)
class Tally:
    """Counts and times since the warm-up."""

    rows: int = 0
    latencies: list[float] = field(default_factory=list)
    lag: float = 0.0
    trained: int = 0  # unrolls
    waited: float = 0.0
    held: float = 0.0
    busy: float = 0.0
    flight: float = 0.0  # messages × seconds


class Cluster:
    """One simulation. Events happen in order of time, and of their making where times are equal."""

    def __init__(self, shape: Shape, costs: Costs, link: Link, jitter: float, seed: int) -> None:
        self._shape, self._costs, self._link = shape, costs, link
        self._jitter, self._random = jitter, random.Random(seed)
        self._now, self._made = 0.0, 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._version = 0
        self._measured_from = INFINITE
        self._in_flight, self._flight_changed = 0, 0.0
        self.tally = Tally()
        self._ranks = [Rank() for _ in range(shape.ranks)]
        for number in range(shape.actors):
            actor, rank = Actor(), self._ranks[number % shape.ranks]
            begins = self._random.uniform(0, 1) * costs.step * bool(jitter)
            for _ in range(shape.groups):
                self._at(begins, self._step, Group(actor, rank, shape.rows))

    def run(self, warm_up: float, seconds: float) -> Outcome:
        self._at(warm_up, self._begin)
        end = warm_up + seconds
        while self._events[0][0] <= end:
            self._now, _, happen, about = heapq.heappop(self._events)
            happen(*about)
        self._now = end
        self._close()
        tally, latencies = self.tally, sorted(self.tally.latencies) or [math.nan]
        thread_seconds = seconds * self._shape.ranks
        return Outcome(
            rows_per_second=tally.rows / seconds,
            latency_mean=sum(latencies) / len(latencies),
            latency_p50=latencies[len(latencies) // 2],
            latency_p99=latencies[int(0.99 * len(latencies))],
            policy_lag=tally.lag / tally.trained / self._shape.unroll_length if tally.trained else math.nan,
            learner_wait=tally.waited / thread_seconds,
            hold=tally.held / thread_seconds,
            server_busy=tally.busy / thread_seconds,
            in_flight=tally.flight / seconds,
        )

    def _at(self, time: float, happen: Callable[..., None], *about: Any) -> None:
        self._made += 1
        heapq.heappush(self._events, (time, self._made, happen, about))

    # Measuring.

    def _begin(self) -> None:
        """The warm-up is over."""
        self.tally = Tally()
        self._measured_from = self._flight_changed = self._now

    def _close(self) -> None:
        self._fly(0)
        for rank in self._ranks:
            if rank.held_since is not None:
                self.tally.held += self._since(rank.held_since)
            if not rank.is_training:
                self.tally.waited += self._since(rank.idle_since)

    def _since(self, time: float) -> float:
        return max(0.0, self._now - max(time, self._measured_from))

    def _fly(self, change: int) -> None:
        self.tally.flight += self._in_flight * self._since(self._flight_changed)
        self._in_flight += change
        self._flight_changed = self._now

    # A group's way round.

    def _step(self, group: Group) -> None:
        """It has its actions; its actor steps one group after another."""
        seconds = self._costs.step * (1 + self._jitter * self._random.uniform(-1, 1))
        group.actor.free = max(self._now, group.actor.free) + seconds
        self._at(group.actor.free, self._send, group)

    def _send(self, group: Group) -> None:
        group.sent = self._now
        self._fly(1)
        rank, link = group.rank, self._link
        rank.link_free = max(self._now, rank.link_free) + group.rows * self._shape.row_bytes / link.bandwidth
        self._at(rank.link_free + link.latency, self._arrive, group)

    def _arrive(self, group: Group) -> None:
        group.rank.unread.append(group)
        self._serve(group.rank)

    def _serve(self, rank: Rank) -> None:
        """The server thread, if it is free, reads what has come and runs a batch unless the store is full."""
        if rank.is_serving:
            return
        costs, seconds = self._costs, 0.0
        for group in rank.unread:
            seconds += costs.message + costs.row * group.rows
        rank.waiting.extend(rank.unread)
        rank.unread.clear()
        batch: list[Group] = []
        if not rank.finished and rank.waiting:
            rows = 0
            while rank.waiting and (not batch or rows + rank.waiting[0].rows <= self._shape.max_rows):
                batch.append(rank.waiting.popleft())
                rows += batch[-1].rows
            seconds += costs.batch + costs.batch_row * rows
        if seconds or batch:
            rank.is_serving = True
            self._at(self._now + seconds, self._answer, rank, batch, seconds)

    def _answer(self, rank: Rank, batch: list[Group], seconds: float) -> None:
        self.tally.busy += min(seconds, self._since(self._now - seconds))
        for group in batch:
            self.tally.rows += group.rows
            self._record(group)
            self._at(self._now + self._link.latency, self._receive, group)
        rank.is_serving = False
        self._commit(rank)
        self._serve(rank)

    def _receive(self, group: Group) -> None:
        if self._now >= self._measured_from:
            self.tally.latencies.append(self._now - group.sent)
        self._fly(-1)
        self._step(group)

    # Unrolls.

    def _record(self, group: Group) -> None:
        group.steps += 1
        group.versions += self._version
        if group.steps == self._shape.unroll_length:
            group.rank.finished.append([group.rows, group.versions])
            group.steps = group.versions = 0

    def _commit(self, rank: Rank) -> None:
        """Finished unrolls move into the store as far as there is room."""
        room = self._shape.room - rank.stored
        while rank.finished and room:
            fits = min(room, rank.finished[0][0])
            rank.ready.append([fits, rank.finished[0][1]])
            rank.stored, room = rank.stored + fits, room - fits
            rank.finished[0][0] -= fits
            if not rank.finished[0][0]:
                rank.finished.popleft()
        if rank.finished and rank.held_since is None:
            rank.held_since = self._now
        elif not rank.finished and rank.held_since is not None:
            self.tally.held += self._since(rank.held_since)
            rank.held_since = None
        self._train(rank)

    def _train(self, rank: Rank) -> None:
        if rank.is_training or rank.trained or rank.stored < self._shape.batch_size:
            return
        rank.is_training = True
        self.tally.waited += self._since(rank.idle_since)
        self._take(rank)
        self._at(self._now + self._costs.update, self._update, rank)
        self._commit(rank)
        self._serve(rank)

    def _take(self, rank: Rank) -> None:
        """The oldest unrolls; their entries are free from now on."""
        left, rank.stored = self._shape.batch_size, rank.stored - self._shape.batch_size
        while left:
            taken = min(left, rank.ready[0][0])
            self.tally.lag += taken * (self._shape.unroll_length * self._version - rank.ready[0][1])
            self.tally.trained += taken
            left -= taken
            rank.ready[0][0] -= taken
            if not rank.ready[0][0]:
                rank.ready.popleft()

    def _update(self, rank: Rank) -> None:
        """Its gradients are there; the update counts once those of all ranks are."""
        rank.is_training, rank.trained, rank.idle_since = False, True, self._now
        if all(each.trained for each in self._ranks):
            self._at(self._now + self._costs.publish, self._publish)

    def _publish(self) -> None:
        self._version += 1
        for rank in self._ranks:
            rank.trained = False
        for rank in self._ranks:
            self._train(rank)


def simulate(
    shape: Shape,
    costs: Costs,
    link: Link = AT_ONCE,
    *,
    warm_up: float = 2.0,
    seconds: float = 4.0,
    jitter: float = 0.1,
    seed: int = 1,
) -> Outcome:
    """`jitter` is the share by which a step may take more or less time; without it actors also begin all at once."""
    return Cluster(shape, costs, link, jitter, seed).run(warm_up, seconds)


def all_reduce_seconds(ranks: int, size: float, link: Link) -> float:
    """Return the time of a ring: every rank sends and receives almost twice the size, in 2(n - 1) messages."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) * (size / ranks / link.bandwidth + link.latency)
