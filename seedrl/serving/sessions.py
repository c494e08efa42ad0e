"""Who is connected and which slots they hold. Knows nothing of gRPC, models or unrolls."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seedrl.config import LearnerConfig, group_size
from seedrl.errors import InvalidMessage, Mismatch, NoCapacity, Refused, Superseded
from seedrl.rows import ENDED, RESET, Rows
from seedrl.serving.seats import ON_POLICY, Exploration, Seat, Seats
from seedrl.specs import EnvSpec
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire.codec import (
    ENV_ID,
    FLAGS,
    REWARD,
    ControlRequest,
    Hello,
    Report,
    Welcome,
    shared_bytes,
)
from seedrl.wire.memory import WORTH_BYTES, OfferedBuffers, this_host

REPORT_SLACK = 60.0  # seconds by which the two clocks of a session may differ
MAX_CORES = 1024  # of an actor
MAX_RECONNECTS = 1_000_000

OTHER_BYTES = ENV_ID.itemsize + REWARD.itemsize + FLAGS.itemsize  # of a row, besides its observation

PAUSES = {pb.Control.COMMAND_PAUSE: True, pb.Control.COMMAND_RESUME: False}  # command → whether it is to pause

IN_FLIGHT = np.uint8(128)  # a row of the environment waits for its action
EXPECTED_AFTER = np.array([RESET if flags & ENDED else 0 for flags in range(8)], np.uint8)  # a row with these flags


@dataclass(eq=False, slots=True)
class Session:
    """The life of one stream. Owned by the server thread."""

    id: int
    name: str
    slots: NDArray[np.int64]  # [num_envs]  the lease: the slot of each environment
    expects: NDArray[np.uint8]  # [num_envs]  of its next row: RESET or 0; IN_FLIGHT: none before its action
    is_paused: bool = False  # it was asked to send no Step
    in_flight: int = 0  # rows that wait for their actions
    unsent: int = 0  # actions that wait for the actor to read those before
    memory: OfferedBuffers | None = None  # shared with the actor
    busy_buffers: set[int] = field(default_factory=set)  # of that memory: a request in flight uses them
    alive: bool = True
    moved_to: str = ""  # the address that it goes on at
    evicted: Refused | None = None  # why, if the learner ends it on its own account
    instance: str = ""  # the actor's process; empty if it does not say
    epoch: int = 0  # of its sessions
    peer: str = ""  # its address, as gRPC sees it
    transport: str = "message"  # or memory: where the observations of its newest request were
    policy_version: int | None = None  # that chose its newest actions
    requests: int = 0  # admitted so far
    steps: int = 0  # rows of those
    joined: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)  # its newest message
    answered_at: float = 0.0  # when its newest actions went out
    measured: Report = field(default_factory=Report)  # its newest report
    recent: Report = field(default_factory=Report)  # what that one added to the one before, in
    recent_seconds: float = 0.0
    reported: float = 0.0  # when; 0 for never

    def admit(self, rows: Rows, buffer: int = 0) -> None:
        """Checks what no single message shows: one row in flight per environment, resets exactly where they belong."""
        if buffer:
            self._use(buffer)
        expected = self.expects.take(rows.env_id)
        if (rows.flags & RESET).tobytes() != expected.tobytes():  # bytes: half the time of comparing arrays
            raise self._complaint(rows)
        if np.count_nonzero(expected) and rows.reward[expected == RESET].any():
            raise InvalidMessage("reward: expected 0 on RESET rows, saw something else")
        self.expects.put(rows.env_id, IN_FLIGHT)
        self.in_flight += len(rows.env_id)
        self.requests += 1
        self.steps += len(rows.env_id)
        if self.expects.tobytes().count(IN_FLIGHT) != self.in_flight:
            raise InvalidMessage("env_id: expected each environment once, saw one twice")

    def answered(self, rows: Rows, buffer: int = 0) -> None:
        self.busy_buffers.discard(buffer)
        self.expects[rows.env_id] = EXPECTED_AFTER[rows.flags]
        self.in_flight -= len(rows.env_id)
        self.answered_at = time.monotonic()

    def expect_reader(self) -> None:
        """Whoever reads Acts before it steps on has no more actions ahead of it than environments."""
        if self.unsent > len(self.slots):
            raise InvalidMessage(
                f"message: expected no step before acts are read, saw {self.unsent} actions for "
                f"{len(self.slots)} environments unread"
            )

    def owes_since(self) -> float | None:
        """Since when it could have sent a Step; None while all of its environments wait for actions."""
        owes = self.in_flight < len(self.slots) and not self.is_paused
        return max(self.heard, self.answered_at) if owes else None

    def measure(self, measured: Report) -> Report:
        """Takes a report; returns what is new since the one before. Refuses what cannot be, as it is added up."""
        now = time.monotonic()
        new, most = measured.since(self.measured), self._most(now - self.joined + REPORT_SLACK)
        for name in Report._fields:
            least, seen, limit = getattr(self.measured, name), getattr(measured, name), getattr(most, name)
            if not least <= seen <= limit:
                raise InvalidMessage(f"report.{name}: expected {least} to {limit}, saw {seen}")
        before = self.reported or self.joined
        self.reported = now
        self.measured, self.recent, self.recent_seconds = measured, new, self.reported - before
        return new

    def _most(self, seconds: float) -> Report:
        """What an actor can have measured in so many seconds."""
        return Report(
            steps=self.steps,
            env_seconds=seconds,
            wait_seconds=seconds,
            requests=self.requests,
            round_trip_seconds=self.requests * seconds,
            cpu_seconds=MAX_CORES * seconds,
            reconnects=MAX_RECONNECTS,
        )

    @property
    def silence(self) -> float:
        """Seconds in which the actor could have said something and did not."""
        owes_nothing = not self.requests or self.in_flight == len(self.slots) or self.is_paused
        return 0.0 if owes_nothing else time.monotonic() - self.heard

    def _use(self, buffer: int) -> None:
        if buffer in self.busy_buffers:
            raise InvalidMessage(f"buffer: expected one with no request in flight, saw {buffer} again")
        self.busy_buffers.add(buffer)
        if self.memory is not None:
            self.memory.close()  # it has been found

    def _complaint(self, rows: Rows) -> InvalidMessage:
        expected = self.expects[rows.env_id]
        busy = rows.env_id[expected == IN_FLIGHT]
        if len(busy):
            return InvalidMessage(f"env_id: expected environments with no row in flight, saw {busy[0]} again")
        row = int(np.argmax((rows.flags & RESET) != expected))
        wanted = "RESET" if expected[row] else "no RESET"
        return InvalidMessage(f"flags: expected {wanted} for environment {rows.env_id[row]}, saw {rows.flags[row]}")


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


def check_message_size(config: LearnerConfig, spec: EnvSpec) -> None:
    """Raise Mismatch if the rows of a group do not fit a message."""
    largest = group_size(config) * (spec.row_bytes + OTHER_BYTES) + 1024
    limit = config.serving.max_message_mb * 1024 * 1024
    if largest > limit:
        raise Mismatch(
            f"spaces: of {spec}, a group takes {largest} bytes and messages may have {limit}; "
            "raise serving.max_message_mb or actors.groups on the learner"
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
    spec: "Future[EnvSpec]" = field(default_factory=Future)  # resolved by the first Ready
    open: dict[int, Session] = field(default_factory=dict)
    on_leave: Callable[[Session], None] = lambda session: None  # called when a session has ended
    is_open: bool = True  # for new sessions; those that are here go on
    exploration: Exploration = ON_POLICY  # of sessions to come
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # of environments, by actor; "" for all
    seats: Seats = field(init=False)  # of all slots
    _opened: int = 0
    _free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        slots = self.config.serving.max_slots
        self.seats = Seats(slots)
        self._free = list(range(slots))

    def superseded_by(self, greeting: Hello) -> Session | None:
        """The open session of the same process, if this one is newer. Raises Superseded if it is not."""
        for session in self.open.values():
            if greeting.instance and session.instance == greeting.instance:
                if greeting.epoch <= session.epoch:
                    raise Superseded(
                        f"epoch: expected more than {session.epoch}, which this actor's open session has, "
                        f"saw {greeting.epoch}"
                    )
                return session
        return None

    def join(self, greeting: Hello, peer: str = "") -> tuple[Session, Welcome]:
        """A new session with a lease of slots, and the job its actor is to run. Raises NoCapacity."""
        actors = self.config.actors
        if self.config.lockstep and self.open:
            raise NoCapacity("a lock-step run has one actor, and it is here already; set lockstep=false for more")
        if not self.is_open:
            raise NoCapacity("this endpoint takes no new actors, and no other has room; see seedrl control open")
        if len(self._free) < actors.envs:
            raise NoCapacity(
                f"{self.slots_taken} of {self.config.serving.max_slots} slots are taken, {actors.envs} more are "
                "needed; raise serving.max_slots on the learner"
            )
        self._opened += 1
        slots, self._free = self._free[: actors.envs], self._free[actors.envs :]
        session = Session(
            id=self._opened,
            name=greeting.name,
            instance=greeting.instance,
            epoch=greeting.epoch,
            peer=peer,
            slots=np.array(slots, np.int64),
            expects=np.full(actors.envs, RESET, np.uint8),
        )
        self.seats.assign(session.slots, self.plan)
        self.seats.explore(session.slots, *self.exploration)
        self.open[session.id] = session
        return session, self._job(session)

    @property
    def recent(self) -> Report:
        """What the newest reports of all actors add up to."""
        reports = [session.recent for session in list(self.open.values())]
        return Report._make(map(sum, zip(Report(), *reports, strict=True)))

    def round_trips(self, since: float) -> tuple[int, float]:
        """How many there were in the reports that came since then, and their seconds, added up."""
        reports = [session.recent for session in list(self.open.values()) if session.reported >= since]
        return sum(each.requests for each in reports), sum(each.round_trip_seconds for each in reports)

    @property
    def slots_taken(self) -> int:
        return self.config.serving.max_slots - len(self._free)

    def leave(self, session: Session) -> None:
        """Ends a session: its slots are free from now on."""
        if self.open.pop(session.id, None) is not None:
            session.alive = False
            if session.memory is not None:
                session.memory.close()
            self._free.extend(session.slots.tolist())
            self.on_leave(session)

    def concerned_by(self, order: ControlRequest) -> list[Session]:
        """The sessions that it is about. Raises InvalidMessage if it names an actor that is not here."""
        concerned = [session for session in self.open.values() if order.actor in ("", session.name)]
        if order.actor and not concerned:
            known = ", ".join(sorted({session.name for session in self.open.values()})) or "none"
            raise InvalidMessage(f"actor: expected one that is connected ({known}), saw {order.actor}")
        return concerned

    def obey(self, order: ControlRequest) -> list[Session]:
        """Notes what people want; returns the sessions that it is about."""
        concerned = self.concerned_by(order)
        if order.open is not None:
            self.is_open = order.open
        if not order.actor:
            self.exploration = self.exploration.changed(order.temperature, order.epsilon)
        if order.options:
            self.options[order.actor] = {**self.options.get(order.actor, {}), **order.options}
        for session in concerned:
            self.seats.explore(session.slots, order.temperature, order.epsilon)
            if order.command in PAUSES:
                session.is_paused = PAUSES[order.command]
                session.heard = time.monotonic()
        return concerned

    def agree(self, spec: EnvSpec) -> None:
        """The first spaces announced become everybody's."""
        check_message_size(self.config, spec)
        if not self.spec.done():
            self.check_spec(spec)
            self.spec.set_result(spec)
        elif self.spec.result() != spec:
            raise Mismatch(f"spaces: this learner trains on {self.spec.result()}; the actor has {spec}")

    def share(self, session: Session, host: str) -> OfferedBuffers | None:
        """Memory for an actor on this machine; None where there can be none, or where it is not worth it."""
        size = shared_bytes(self.spec.result(), group_size(self.config))
        if not self.config.serving.shared_memory or not host or host != this_host() or size < WORTH_BYTES:
            return None
        session.memory = OfferedBuffers(len(session.slots) // group_size(self.config), size)
        return session.memory

    def _job(self, session: Session) -> Welcome:
        env, actors = self.config.env, self.config.actors
        return Welcome(
            session_id=session.id,
            env_id=env.id,
            options={**env.options, **self.options.get("", {}), **self.options.get(session.name, {})},
            keep=list(env.keep),
            num_envs=actors.envs,
            group_size=group_size(self.config),
            seed=self.job_seed(session.id),
            processes=env.processes,
            wrappers=list(env.wrappers),
        )
