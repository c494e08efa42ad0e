"""Carries faults out on a cluster and watches how long its actors take to stream again. Does not choose the faults."""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.chaos.cluster import START_SECONDS, Cluster, Progress
from tests.chaos.faults import Fault, Kind

TICK_SECONDS = 0.05
DELAY_SECONDS = 0.05
THROTTLED = 100_000.0  # bytes per second
SOON_SECONDS = 3.0  # faults so close together belong together
BREAKS = (Kind.kill, Kind.leave, Kind.cut, Kind.black_hole)  # a stream for sure; the others may or may not


@dataclass(slots=True)
class Recovery:
    """From a fault to the first answer that an actor gets afterwards."""

    kind: Kind
    actor: int
    since: float
    session: float = 0.0  # it has to be in a later one than this
    answered: float | None = None  # and to have more answers than this; None until it is in that session
    seconds: float | None = None  # None until it has recovered

    def look(self, progress: Progress, now: float) -> bool:
        """Return whether it has recovered."""
        if progress.sessions > self.session and self.answered is None:
            self.answered = progress.answered
        if self.answered is not None and progress.answered > self.answered:
            self.seconds = now - self.since
        return self.seconds is not None


@dataclass(slots=True)
class Failover:
    """A learner that was killed: how long until its port was open again, and its actors streamed."""

    killed: float
    opened: float | None = None
    waits_for: set[int] = field(default_factory=set)  # actors with no other trouble
    is_over: bool = False
    down_seconds: float = 0.0
    stream_seconds: float | None = None  # from the port to the last of those actors; None if all had other trouble


class Disturbance:
    """Owned by one thread. `recoveries` and `failovers` are those that happened, `waiting` the ones to come."""

    def __init__(self, cluster: Cluster, say: Callable[[str], None] = print) -> None:
        self._cluster = cluster
        self._say = say
        self._last: dict[int, Progress] = {}
        self._ends: list[tuple[float, Fault]] = []  # of faults that last
        self._stopped: set[int] = set()
        self.waiting: dict[int, Recovery] = {}  # by actor
        self.recoveries: list[Recovery] = []
        self.failovers: list[Failover] = []
        self.injected: list[Fault] = []

    def run(self, faults: Sequence[Fault], seconds: float, watch: Callable[[], None] = lambda: None) -> None:
        """Carries out a schedule; `watch` is called at every tick. Ends early if a process is gone by itself.

        The schedule waits for a learner that was killed, once it has had the faults that come right after that.
        """
        left, passed, last = list(faults), 0.0, time.monotonic()
        while (left or passed < seconds) and not self._cluster.look_for_exits():
            while left and left[0].at <= passed:
                self.inject(left.pop(0))
            self.tick()
            watch()
            time.sleep(TICK_SECONDS)
            now = time.monotonic()
            if not self._is_down or (left and left[0].at < passed + SOON_SECONDS):
                passed += now - last
            last = now
        self._end_all()

    def recover(self, watch: Callable[[], None] = lambda: None, seconds: float = START_SECONDS) -> None:
        """Waits until every actor streams, whatever has happened to it."""
        deadline = time.monotonic() + seconds
        while (self.waiting or self._is_down) and time.monotonic() < deadline and not self._cluster.look_for_exits():
            self.tick()
            watch()
            time.sleep(TICK_SECONDS)

    def inject(self, fault: Fault) -> None:
        self.injected.append(fault)
        self._say(f"{fault}")
        if fault.kind is Kind.kill_learner:
            self._kill_learner()
        else:
            self._disturb(fault)

    def tick(self) -> None:
        """Ends faults whose time is over, and looks who has recovered."""
        now = time.monotonic()
        for end in [end for end in self._ends if end[0] <= now]:
            self._end(*end)
        for number in range(self._cluster.setup.actors):
            self._look_at_actor(number)
        if self._is_down:
            self._look_at_failover(self.failovers[-1])

    # Faults.

    def _end_all(self) -> None:
        for end in list(self._ends):
            self._end(*end)

    def _disturb(self, fault: Fault) -> None:
        cluster, number, now = self._cluster, fault.actor, time.monotonic()
        proxy, before = cluster.proxies[number], self._last.get(number, Progress(0, 0))
        if fault.seconds:
            self._ends.append((now + fault.seconds, fault))
        match fault.kind:
            case Kind.kill | Kind.leave:
                self._stopped.discard(number)
                cluster.restart_actor(number, signal.SIGKILL if fault.kind is Kind.kill else signal.SIGTERM)
                self._last[number] = before = Progress(0, 0)
            case Kind.stop:
                cluster.actors[number].signal(signal.SIGSTOP)
                self._stopped.add(number)
            case Kind.cut:
                proxy.cut()
            case Kind.black_hole:
                proxy.black_hole()
            case Kind.delay:
                proxy.delay = DELAY_SECONDS
            case Kind.throttle:
                proxy.bytes_per_second = THROTTLED
        if self._is_down:
            self.failovers[-1].waits_for.discard(number)
        self.waiting[number] = Recovery(fault.kind, number, now, self._session_before(fault, before))

    def _session_before(self, fault: Fault, before: Progress) -> float:
        """An actor recovers in a later session than this one."""
        if fault.kind in BREAKS:
            return before.sessions
        if (pending := self.waiting.get(fault.actor)) is not None:  # what broke its stream then still holds
            return pending.session
        return before.sessions - 1

    def _end(self, when: float, fault: Fault) -> None:
        self._ends.remove((when, fault))
        if fault.kind is Kind.stop:
            self._cluster.actors[fault.actor].signal(signal.SIGCONT)
            self._stopped.discard(fault.actor)
        else:
            self._cluster.proxies[fault.actor].heal()
        if (pending := self.waiting.get(fault.actor)) is not None and pending.kind is fault.kind:
            pending.since = time.monotonic()

    # The learner.

    @property
    def _is_down(self) -> bool:
        return bool(self.failovers) and not self.failovers[-1].is_over

    def _kill_learner(self) -> None:
        now = time.monotonic()
        untroubled = set(range(self._cluster.setup.actors)) - self.waiting.keys() - self._stopped
        self._cluster.restart_learner()
        self.failovers.append(Failover(now, waits_for=untroubled))
        for number in range(self._cluster.setup.actors):
            before = self._last.get(number, Progress(0, 0))
            self.waiting[number] = Recovery(Kind.kill_learner, number, now, before.sessions)

    def _look_at_failover(self, failover: Failover) -> None:
        now = time.monotonic()
        if failover.opened is None and self._cluster.is_open():
            failover.opened, failover.down_seconds = now, now - failover.killed
        if failover.opened is not None and not failover.waits_for & self.waiting.keys():
            failover.is_over = True
            failover.stream_seconds = now - failover.opened if failover.waits_for else None

    def _look_at_actor(self, number: int) -> None:
        if number in self._stopped or (progress := self._cluster.progress(number)) is None:
            return
        self._last[number] = progress
        recovery = self.waiting.get(number)
        if recovery is not None and recovery.look(progress, time.monotonic()):
            self.recoveries.append(self.waiting.pop(number))
