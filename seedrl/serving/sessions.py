"""The open sessions, their leases, traffic and reports. Knows nothing of gRPC, models or unrolls."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seedrl.config import LearnerConfig
from seedrl.errors import InvalidMessage, Mismatch, NoCapacity, Refused, Superseded
from seedrl.rows import RESET, Rows
from seedrl.serving.lease import Lease
from seedrl.serving.seats import NO_ORDER, ON_POLICY, Exploration, Order, Schedule, Seat, Seats
from seedrl.sizes import group_size
from seedrl.specs import EnvSpec
from seedrl.wire.codec import ENV_ID, FLAGS, REWARD
from seedrl.wire.layout import shared_bytes
from seedrl.wire.memory import WORTH_BYTES, OfferedBuffers, this_host
from seedrl.wire.messages import (
    MAX_MESSAGE_BYTES,
    MAX_REDIRECTS,
    MIN_MESSAGE_BYTES,
    Command,
    ControlRequest,
    Hello,
    Report,
    Welcome,
)
from seedrl.wire.security import is_socket

REPORT_SLACK = 60.0  # seconds by which the two clocks of a session may differ
MAX_CORES = 1024  # of an actor
MAX_RECONNECTS = 1_000_000

FRAME_BYTES = 1024  # of a Step, besides its rows
OTHER_BYTES = ENV_ID.itemsize + REWARD.itemsize + FLAGS.itemsize  # of a row, besides its observation

PAUSES = {Command.PAUSE: True, Command.RESUME: False}  # command → whether sessions are paused then


@dataclass(eq=False, slots=True)
class Traffic:
    """The messages of a session: how many there were, and when. Owned by the server thread."""

    requests: int = 0  # admitted so far
    steps: int = 0  # rows of those
    unsent: int = 0  # actions that wait in the outbox, because the actor has not read those before
    transport: str = "message"  # or memory: where the observations of the newest request were
    joined: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)  # the newest message came
    answered: float = 0.0  # the newest actions were chosen


@dataclass(eq=False, slots=True)
class Reports:
    """The measurements that an actor reports. Owned by the server thread."""

    newest: Report = field(default_factory=Report)
    recent: Report = field(default_factory=Report)  # the difference between the newest report and the one before
    recent_seconds: float = 0.0  # between those two
    received: float = 0.0  # when the newest came; 0 for never

    def take(self, report: Report, most: Report, since: float) -> Report:
        """Take a report; return its difference from the one before. Refuses numbers that cannot be true.

        `most` holds the largest numbers that can be true, `since` is when the session began.
        """
        for name in Report._fields:
            least, seen, limit = getattr(self.newest, name), getattr(report, name), getattr(most, name)
            if not least <= seen <= limit:
                raise InvalidMessage(f"report.{name}: expected {least} to {limit}, saw {seen}")
        before, self.received = self.received or since, time.monotonic()
        self.newest, self.recent = report, report.since(self.newest)
        self.recent_seconds = self.received - before
        return self.recent


@dataclass(eq=False, slots=True)
class Session:
    """The life of one stream. Owned by the server thread."""

    id: int
    hello: Hello
    lease: Lease
    peer: str = ""  # the actor's address, as gRPC sees it
    policy_version: int | None = None  # of the policy that chose its newest actions
    has_joined: bool = False  # its Ready was accepted
    is_paused: bool = False  # the actor was asked to send no Step
    alive: bool = True
    moved_to: str = ""  # the address that its actor was redirected to
    evicted: Refused | None = None  # why the learner ends it
    traffic: Traffic = field(default_factory=Traffic)
    reports: Reports = field(default_factory=Reports)

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def follows_redirects(self) -> bool:
        return follows_redirects(self.hello)

    def admit(self, rows: Rows, buffer: int = 0) -> None:
        """Count the rows of a Step. Raises InvalidMessage if they break a rule."""
        self.lease.admit(rows, buffer)
        self.traffic.requests += 1
        self.traffic.steps += len(rows.env_id)

    def answered(self, rows: Rows, buffer: int = 0) -> None:
        self.lease.answered(rows, buffer)
        self.traffic.answered = time.monotonic()

    def expect_reader(self) -> None:
        """Refuse an actor that sends Steps without reading Acts: more actions wait for it than it has environments."""
        unsent, envs = self.traffic.unsent, len(self.lease.slots)
        if unsent > envs:
            raise InvalidMessage(
                f"message: expected no step before acts are read, saw {unsent} actions for {envs} environments unread"
            )

    def owes_since(self) -> float | None:
        """Return since when the actor could have sent a Step; None while all of its environments wait for actions."""
        owes_nothing = self.lease.is_all_in_flight or self.is_paused
        return None if owes_nothing else max(self.traffic.heard, self.traffic.answered)

    @property
    def silence(self) -> float:
        """The seconds in which the actor could have sent a message and did not."""
        owes_nothing = not self.traffic.requests or self.lease.is_all_in_flight or self.is_paused
        return 0.0 if owes_nothing else time.monotonic() - self.traffic.heard

    def measure(self, report: Report) -> Report:
        """Take a report; return its difference from the one before. Raises InvalidMessage if it cannot be true."""
        return self.reports.take(report, self._most(), self.traffic.joined)

    def _most(self) -> Report:
        """Return the largest numbers that a report can have by now."""
        traffic = self.traffic
        seconds = time.monotonic() - traffic.joined + REPORT_SLACK
        return Report(
            steps=traffic.steps,
            env_seconds=seconds,
            wait_seconds=seconds,
            requests=traffic.requests,
            round_trip_seconds=traffic.requests * seconds,
            cpu_seconds=MAX_CORES * seconds,
            reconnects=MAX_RECONNECTS,
        )


@dataclass(eq=False, slots=True)
class Request:
    """The rows of one Step on their way to a batch."""

    session: Session
    request_id: int
    content: Rows
    slots: NDArray[np.int64]  # [n]

    buffer: int = 0  # that holds the observations; 0: they came with the message
    arrived: float = field(default_factory=time.monotonic)

    @property
    def rows(self) -> int:
        return len(self.slots)


def follows_redirects(hello: Hello) -> bool:
    """Tell whether an actor may be redirected, at Hello and later: one that counts too many is served or refused."""
    return hello.redirects < MAX_REDIRECTS


def step_bytes(spec: EnvSpec, rows: int) -> int:
    """Return the most bytes that a Step with this many rows takes."""
    return rows * (spec.row_bytes + OTHER_BYTES) + FRAME_BYTES


def check_message_size(config: LearnerConfig, spec: EnvSpec) -> None:
    """Raise Mismatch if the rows of a group do not fit a message."""
    rows = group_size(config)
    largest = step_bytes(spec, rows)
    if largest > MAX_MESSAGE_BYTES:
        raise Mismatch(
            f"spaces: {rows} rows of {spec} take {largest} bytes, and a message may have {MAX_MESSAGE_BYTES}; "
            "raise actors.groups on the learner"
        )


def session_seed(run_seed: int, earlier_processes: int, session_id: int, rank: int = 0) -> int:
    """Return the seed of a session's environments. It is the same if a run is repeated, and otherwise never twice.

    `earlier_processes` counts the learner processes that the run had before this one, whatever became of them.
    """
    origin = [run_seed, earlier_processes, session_id, *([rank] if rank else [])]
    return int(np.random.SeedSequence(origin).generate_state(1)[0]) >> 2


@dataclass(eq=False)
class SessionTable:
    """Leases slots to sessions. Owned by the server thread; other threads may read the counts."""

    config: LearnerConfig
    job_seed: Callable[[int], int]  # session id → seed of its environments
    plan: Sequence[Seat]  # the seats of each actor's environments
    check_spec: Callable[[EnvSpec], None] = lambda spec: None  # raises Mismatch for spaces that cannot be held
    on_leave: Callable[[Session], None] = lambda session: None  # called when a session has ended, except at the end
    spec: "Future[EnvSpec]" = field(default_factory=Future)  # resolved by the first Ready
    open: dict[int, Session] = field(default_factory=dict)
    is_open: bool = True  # for new sessions; open ones continue either way
    is_draining: bool = False  # the learner is about to end
    order: Order = NO_ORDER  # of exploration, for sessions to come as well
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # of environments, by actor; "" for all
    seats: Seats = field(init=False)  # of all slots
    _opened: int = 0
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        slots = self.config.serving.max_slots
        self.seats = Seats(slots, Schedule.of(self.config.exploration), self.config.env.players)
        self._free = list(range(slots))

    def superseded_by(self, hello: Hello) -> Session | None:
        """Return the open session of the same process, if any. Raises Superseded if that one is the newer."""
        for session in self.open.values():
            if hello.instance and session.hello.instance == hello.instance:
                epoch = session.hello.epoch
                if hello.epoch <= epoch:
                    raise Superseded(
                        f"epoch: expected more than {epoch}, which this actor's open session has, saw {hello.epoch}"
                    )
                return session
        return None

    def join(self, hello: Hello, peer: str = "", envs: int = 0) -> tuple[Session, Welcome]:
        """Return a new session with a lease of slots, and the Welcome for its actor. Raises NoCapacity.

        A session has `envs` environments of one player if that is not 0, and actors.envs otherwise.
        """
        players = 1 if envs else self.config.env.players
        envs = envs or self.config.actors.envs
        if self.config.lockstep and self.open:
            raise NoCapacity("a lock-step run has one actor, which is connected already; set lockstep=false for more")
        if not self.is_open:
            raise NoCapacity("this endpoint takes no new actors, and no other has room; see seedrl control open")
        if len(self._free) < envs:
            raise NoCapacity(
                f"{self.slots_taken} of {self.config.serving.max_slots} slots are taken, {envs} more are "
                "needed; raise serving.max_slots on the learner"
            )
        self._opened += 1
        slots, self._free = self._free[:envs], self._free[envs:]
        session = Session(
            id=self._opened,
            hello=hello,
            lease=Lease(np.array(slots, np.int64), np.full(envs, RESET, np.uint8), players),
            peer=peer,
        )
        self.seats.assign(session.lease.slots, self.plan[:envs])
        self.seats.explore(session.lease.slots, *self.order)
        self.open[session.id] = session
        return session, self._welcome(session)

    @property
    def recent(self) -> Report:
        """The sum of what the newest report of each actor added."""
        reports = [session.reports.recent for session in list(self.open.values())]
        return Report._make(map(sum, zip(Report(), *reports, strict=True)))

    def round_trips(self, since: float) -> tuple[int, float]:
        """Return the number and the total seconds of the round trips in the reports that came since then."""
        reports = [session.reports for session in list(self.open.values())]
        recent = [each.recent for each in reports if each.received >= since]
        return sum(each.requests for each in recent), sum(each.round_trip_seconds for each in recent)

    @property
    def exploration(self) -> tuple[Exploration, Exploration]:
        """Return the smallest and the largest values of the environments that are trained on now."""
        slots = [session.lease.slots for session in list(self.open.values())]
        taken = np.concatenate(slots) if slots else np.zeros(0, np.int64)
        trained = taken[self.seats.is_trained[taken]]
        if not len(trained):
            return ON_POLICY, ON_POLICY
        columns = np.stack((self.seats.temperature[trained], self.seats.epsilon[trained]), axis=1)
        return Exploration(*columns.min(axis=0).tolist()), Exploration(*columns.max(axis=0).tolist())

    @property
    def movable(self) -> list[Session]:
        """The sessions whose actors follow redirects, oldest first."""
        return [session for session in self.open.values() if session.follows_redirects]

    @property
    def slots_taken(self) -> int:
        return self.config.serving.max_slots - len(self._free)

    def leave(self, session: Session) -> None:
        """End a session and free its slots. Leaving twice changes nothing."""
        if self.open.pop(session.id, None) is not None:
            session.alive = False
            session.lease.close()
            self._free.extend(session.lease.slots.tolist())
            if not self.is_draining:  # unfinished unrolls at the end of a run were not lost by a session
                self.on_leave(session)

    def drain(self) -> None:
        """Take no new session: the learner is about to end."""
        self.is_open, self.is_draining = False, True

    def concerned_by(self, order: ControlRequest) -> list[Session]:
        """Return the sessions that a request is about. Raises InvalidMessage if its actor is not connected."""
        concerned = [session for session in self.open.values() if order.actor in ("", session.name)]
        if order.actor and not concerned:
            known = ", ".join(sorted({session.name for session in self.open.values()})) or "none"
            raise InvalidMessage(f"actor: expected one that is connected ({known}), saw {order.actor}")
        return concerned

    def obey(self, order: ControlRequest) -> list[Session]:
        """Apply a request; return the sessions that it is about."""
        concerned = self.concerned_by(order)
        if order.open is not None:
            self.is_open = order.open
        if not order.actor:
            self.order = self.order.changed(order.temperature, order.epsilon)
        if order.options:
            self.options[order.actor] = {**self.options.get(order.actor, {}), **order.options}
        for session in concerned:
            self.seats.explore(session.lease.slots, order.temperature, order.epsilon)
            if order.command in PAUSES:
                session.is_paused = PAUSES[order.command]
                session.traffic.heard = time.monotonic()
        return concerned

    def agree(self, spec: EnvSpec) -> None:
        """Take the first spaces announced as those of the run. Raises Mismatch if these differ from them."""
        check_message_size(self.config, spec)
        if not self.spec.done():
            self.check_spec(spec)
            self.spec.set_result(spec)
        elif self.spec.result() != spec:
            raise Mismatch(f"spaces: this learner trains on {self.spec.result()}; the actor has {spec}")

    @property
    def longest_message(self) -> int:
        """Return the most bytes that a message may have: what its rows need as soon as the spaces are known.

        Until then strangers could send anything, but only this user can connect to a socket in the file system.
        """
        if not self.spec.done():
            return MIN_MESSAGE_BYTES if self.config.listen and not is_socket(self.config.listen) else MAX_MESSAGE_BYTES
        return min(max(MIN_MESSAGE_BYTES, step_bytes(self.spec.result(), self.config.actors.envs)), MAX_MESSAGE_BYTES)

    def share(self, session: Session) -> OfferedBuffers | None:
        """Make memory to share with an actor on this machine; None if it cannot be shared, or is not worth it."""
        size, host = shared_bytes(self.spec.result(), group_size(self.config)), session.hello.host
        if not self.config.serving.shared_memory or not host or host != this_host() or size < WORTH_BYTES:
            return None
        session.lease.memory = OfferedBuffers(len(session.lease.slots) // group_size(self.config), size)
        return session.lease.memory

    def _welcome(self, session: Session) -> Welcome:
        env, actors = self.config.env, self.config.actors
        return Welcome(
            session_id=session.id,
            env_id=env.id,
            options={**env.options, **self.options.get("", {}), **self.options.get(session.name, {})},
            num_envs=actors.envs,
            group_size=group_size(self.config),
            seed=self.job_seed(session.id),
            processes=env.processes,
            wrappers=list(env.wrappers),
            players=env.players,
        )
