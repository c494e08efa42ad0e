"""The session protocol, from Hello to goodbye, over any Stream. Knows nothing of gRPC, protobuf or models.

A session has a reader, which turns Steps into requests for the batcher, and a writer, which sends what is in the
session's outbox. Both run in the event loop of the server thread.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from seedrl.config import LearnerConfig
from seedrl.errors import InvalidMessage, NoCapacity, NotGranted, Refused, Superseded, TooLate
from seedrl.metrics import ServingMetrics, Stopwatch
from seedrl.serving.balance import Balance
from seedrl.serving.batcher import Batcher
from seedrl.serving.inference import Answer
from seedrl.serving.quarantine import Quarantine
from seedrl.serving.refusals import RefusalLog
from seedrl.serving.sessions import OTHER_BYTES, Request, Session, SessionTable, follows_redirects
from seedrl.serving.stream import Connection, Stream, kind_of, receive, send_outbox
from seedrl.specs import Arrays, EnvSpec, as_tree, leaves
from seedrl.status import DRAINED
from seedrl.wire import codec
from seedrl.wire.control import describe_request
from seedrl.wire.messages import (
    MAX_MESSAGE_BYTES,
    MAX_REDIRECTS,
    PING_PATIENCE,
    Command,
    Control,
    ControlRequest,
    Hello,
    MemberResult,
    Outcome,
    Ready,
    Report,
    StepParts,
    Welcome,
)

HELLO_SECONDS = 10.0  # from connecting to the first message
READY_SECONDS = 120.0  # to build a pool
SPARE_STREAMS = 64  # streams beyond one per slot, for actors that have not sent Hello
MOVE_SECONDS = 5.0  # for an actor to end its half of the stream when it is redirected
CANCEL_SECONDS = 0.1  # from the end of a stream until gRPC cancels its call, if the actor or the connection broke it
GOODBYE_SECONDS = 2.0  # for actors to leave when asked to


class SessionProtocol:
    """All sessions of one learner process. Owned by the server thread."""

    def __init__(
        self,
        config: LearnerConfig,
        sessions: SessionTable,
        balance: Balance,
        batcher: Batcher[Request],
        metrics: ServingMetrics,
        say: Callable[[str], None],
        on_member: Callable[[Session, bool], None] = lambda session, has_joined: None,
    ) -> None:
        """`on_member` is called with true when an actor has joined, and with false when it has left."""
        self._config = config
        self._sessions = sessions
        self._balance = balance
        self._batcher = batcher
        self._metrics = metrics
        self._say = say
        self._on_member = on_member
        self._log_refusal = RefusalLog(say)
        self._quarantine = Quarantine()
        self._bounds = codec.Bounds(config.serving.max_observation, config.serving.max_reward)
        self._streams = 0
        self._goodbye: Control | None = None  # once the learner is about to end
        self._draining = asyncio.Event()  # set then
        self.room = MAX_MESSAGE_BYTES  # for a message; what the server reads
        self.connections: dict[int, Connection] = {}  # by session id

    @property
    def longest_message(self) -> int:
        return self._sessions.longest_message

    @property
    def spec(self) -> "Future[EnvSpec]":
        return self._sessions.spec

    async def serve(self, stream: Stream, envs: int = 0) -> None:
        """Run one session, from Hello to the end of the stream. `envs` is its size if that is not actors.envs."""
        if self._goodbye is not None:
            await stream.write(self._goodbye)
            return
        counted = self._metrics.sessions_refused
        name, peer = "an actor", stream.peer()  # gRPC forgets the peer of a call that has ended
        session: Session | None = None
        self._streams += 1
        try:
            self._expect_room()
            hello = await receive(stream, Hello, HELLO_SECONDS)
            if hello is None:
                self._log_early_end(name, peer, Hello)
                return
            name = hello.name
            await self._sit_out(hello)
            if control := self._instead_of_welcome(hello):
                await stream.write(control)
                return
            session, welcome = self._admit(hello, peer, envs)
            counted = self._metrics.sessions_evicted
            await self._session(stream, session, welcome)
            if self._goodbye is None and not session.moved_to:
                await asyncio.sleep(CANCEL_SECONDS)
            self._count_end(session, "left")
        except asyncio.CancelledError:
            if session is not None:
                self._count_end(session, _loss(session))
            raise
        except Refused as error:
            counted[error.reason] += 1
            if session is not None and isinstance(error, InvalidMessage | NotGranted):
                self._quarantine.impose(session.hello.instance)
            verb = "ended the session of" if session is not None and session.has_joined else "refused"
            self._log_refusal(f"learner: {verb} {name} ({peer}): {error}")
            await stream.abort(error.with_traceback(None))  # its frames would hold the message for a while
        except Exception as error:
            counted["internal"] += 1
            self._log_refusal(f"learner: a session of {name} ({peer}) failed: {error!r}")
            await stream.abort(error)
        finally:
            self._streams -= 1

    def answer(self, answers: list[Answer]) -> None:
        """Send actions, those of one session in one message."""
        by_session: dict[int, list[Answer]] = {}
        for request, action in answers:
            request.session.answered(request.content, request.buffer)
            request.session.lease.requests.discard(request.request_id)
            by_session.setdefault(request.session.id, []).append((request, action))
        for session_id, own in by_session.items():
            connection = self.connections.get(session_id)
            if connection is not None:
                message = codec.encode_act([request.request_id for request, _ in own], _joined(own))
                rows = sum(request.rows for request, _ in own)
                connection.send(message, rows)
                own[0][0].session.traffic.unsent += rows
                self._metrics.sent_bytes += sum(map(len, message.action))

    def control(self, order: ControlRequest, peer: str) -> list[MemberResult]:
        """Do what `seedrl control` asks for; return what became of it, by session. Raises InvalidMessage.

        A move is one for all sessions that it is about, or for none.
        """
        sessions = self._sessions.concerned_by(order)
        places: list[str] = []
        if order.command is Command.REDIRECT:
            try:
                places = self._places_for(sessions)
            except InvalidMessage as error:
                if not sessions:
                    raise
                return [MemberResult(session.name, Outcome.refused, str(error)) for session in sessions]
        self._carry_out(order, sessions, places, peer)
        return [MemberResult(session.name) for session in sessions]

    def _carry_out(self, order: ControlRequest, sessions: list[Session], places: list[str], peer: str) -> None:
        self._sessions.obey(order)
        words = describe_request(order)
        self._say(f"learner: {peer} asks {order.actor or 'all actors'}: {words}")
        reason = DRAINED if order.command is Command.END else f"Asked to: {words}"
        if order.command is Command.REDIRECT:
            for session, place in zip(sessions, places, strict=True):
                self._move(session, place, "drain", reason)
        elif order.command:
            for session in sessions:
                self.connections[session.id].send(Control(order.command, reason))

    def move_one_if_overloaded(self) -> None:
        """Redirect the newest session that follows if this endpoint has had far too many for a while."""
        address = self._balance.overload()
        if address is not None:
            newest = self._sessions.movable[-1]
            self._move(newest, address, "rebalance", "this endpoint has too many actors")

    def drain(self, goodbye: Control) -> None:
        """Admit no session from now on; every later stream is answered with the goodbye."""
        if self._goodbye is None:
            self._goodbye = goodbye
            self._draining.set()
            self._sessions.drain()

    async def say_goodbye(self) -> None:
        """Send the goodbye to every actor, and give them a moment to leave."""
        assert self._goodbye is not None
        for connection in self.connections.values():
            connection.send(self._goodbye)
        deadline = time.monotonic() + GOODBYE_SECONDS
        while self.connections and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    # How a session begins.

    def _expect_room(self) -> None:
        limit = self._config.serving.max_slots + SPARE_STREAMS
        if self._streams > limit:
            raise NoCapacity(f"{limit} streams are open, which is the limit; raise serving.max_slots on the learner")

    def _expect_room_for_messages(self) -> None:
        """Raise NoCapacity if the server reads shorter messages than the spaces need, which it is about to change."""
        if self.longest_message > self.room:
            raise NoCapacity(
                f"spaces: a message has up to {self.longest_message} bytes, more than the {self.room} that a learner "
                "reads before it knows them; it is about to listen again with that room, so join again"
            )

    async def _sit_out(self, hello: Hello) -> None:
        """Wait as long as an actor has to whose last session broke a rule, or until the learner is about to end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._draining.wait(), self._quarantine.seconds_left(hello.instance))

    def _instead_of_welcome(self, hello: Hello) -> Control | None:
        """Return the message for an actor that is not admitted here; None if it may be. Raises Superseded."""
        if self._goodbye is not None:
            return self._goodbye
        self._make_way(hello)
        address = self._better_place(hello)
        return Control(Command.REDIRECT, "another endpoint has more room", address) if address else None

    def _make_way(self, hello: Hello) -> None:
        """End an older session of the same process. Raises Superseded if the open one is the newer."""
        older = self._sessions.superseded_by(hello)
        if older is not None:
            self._evict(older, Superseded("superseded by a newer session of the same actor"))

    def _better_place(self, hello: Hello) -> str | None:
        """Return the address of the endpoint that the actor should use; None if it is served, or refused, here."""
        if not follows_redirects(hello):
            return None
        address = self._balance.choose(self._config.actors.envs, is_sent=hello.redirects > 0)
        if address is not None:
            self._metrics.sessions_redirected["balance" if self._sessions.is_open else "closed"] += 1
        return address

    def _admit(self, hello: Hello, peer: str, envs: int) -> tuple[Session, Welcome]:
        """Return a new session and its Welcome. Raises NoCapacity."""
        joined = self._sessions.join(hello, peer, envs)
        self._metrics.sessions_joined += 1
        self._metrics.actors_env_failures += bool(hello.env_failure)
        return joined

    def _log_early_end(self, name: str, peer: str, kind: type) -> None:
        """gRPC ends a stream whose message is too long as if the actor had left, and tells only the actor why."""
        self._log_refusal(
            f"learner: {name} ({peer}) left before its {kind.__name__}, or sent a message of more than "
            f"{self.room} bytes"
        )

    async def _session(self, stream: Stream, session: Session, welcome: Welcome) -> None:
        """Run a session from Welcome to the end of the stream."""
        connection = self.connections[session.id] = Connection(asyncio.timeout(None))
        writer = asyncio.create_task(send_outbox(connection, session, stream), name=f"writer-{session.id}")
        try:
            async with connection.limit:
                connection.send(welcome if self._goodbye is None else self._goodbye)
                ready = await receive(stream, Ready, READY_SECONDS)
                if ready is not None:
                    await self._run(stream, session, ready.spec)
                elif self._goodbye is None:
                    self._log_early_end(session.name, session.peer, Ready)
        except TimeoutError:
            if session.evicted is not None:
                raise session.evicted from None
            assert session.moved_to  # and its actor has not left: the stream ends without it
        finally:
            writer.cancel()
            del self.connections[session.id]
            self._end(session)
            if session.has_joined:
                self._on_member(session, False)

    async def _run(self, stream: Stream, session: Session, spec: EnvSpec) -> None:
        """Run a session from Ready to the end of the stream."""
        self._sessions.agree(spec)
        self._expect_room_for_messages()
        memory = self._sessions.share(session) if session.alive else None
        if memory is not None:
            self.connections[session.id].send(memory.offer)
        failure = session.hello.env_failure
        why = f"; before that, {failure}" if failure else ""
        self._say(f"learner: {session.name} joined with {len(session.lease.slots)} environments{why}")
        session.has_joined = True
        self._on_member(session, True)
        session.traffic.heard = time.monotonic()
        watch = asyncio.create_task(self._watch(session), name=f"watch-{session.id}")
        try:
            await self._read(stream, session, spec)
        finally:
            watch.cancel()

    # Moving, evicting and ending sessions.

    async def _read(self, stream: Stream, session: Session, spec: EnvSpec) -> None:
        spent = self._metrics.serving_seconds
        while message := await stream.read():
            timer = Stopwatch(spent)
            session.traffic.heard = timer.last
            if isinstance(message, StepParts):
                session.expect_reader()
                self._take(self._request(message, session, spec))
            elif isinstance(message, Report):
                self._count_report(session.measure(message))
            else:
                raise InvalidMessage(f"message: expected step or report, saw {kind_of(message)}")
            timer.lap("read")

    def _request(self, step: StepParts, session: Session, spec: EnvSpec) -> Request:
        lease, traffic = session.lease, session.traffic
        rows = codec.decode_step(step, spec, len(lease.slots), lease.memory, self._bounds)
        lease.begin(step.request_id)
        session.admit(rows, step.buffer)
        traffic.transport = "memory" if step.buffer else "message"
        self._metrics.received_bytes[traffic.transport] += len(rows.flags) * (spec.row_bytes + OTHER_BYTES)
        return Request(session, step.request_id, rows, lease.slots[rows.env_id], step.buffer, traffic.heard)

    def _take(self, request: Request) -> None:
        if request.session.alive:
            self._batcher.submit(request)
        else:  # the actor sent it before it received the redirect
            self._metrics.rows_dropped["session_ended"] += request.rows

    def _count_report(self, new: Report) -> None:
        metrics = self._metrics
        metrics.actors_steps += new.steps
        metrics.actors_env_seconds += new.env_seconds
        metrics.actors_wait_seconds += new.wait_seconds
        metrics.actors_requests += new.requests
        metrics.actors_round_trip_seconds += new.round_trip_seconds
        metrics.actors_cpu_seconds += new.cpu_seconds
        metrics.actors_reconnects += new.reconnects > 0  # the first report of a session that is not its first

    async def _watch(self, session: Session) -> None:
        """Evict an actor that owes a Step for too long. Keepalive notices only machines that are gone."""
        limit = self._config.serving.max_silence
        silent = 0.0
        while silent < limit:
            await asyncio.sleep(limit - silent)
            since = session.owes_since()
            silent = 0.0 if since is None else time.monotonic() - since
        if limit and session.alive:
            self._evict(session, TooLate(f"message: expected step within {limit:g} s, saw nothing for {silent:.0f} s"))

    # How it ends.

    def _end(self, session: Session) -> None:
        """Free the lease, and drop the unfinished unrolls and the rows that wait."""
        self._sessions.leave(session)
        dropped = self._batcher.drop(lambda request: request.session is session)
        self._metrics.rows_dropped["session_ended"] += dropped if self._goodbye is None else 0

    def _count_end(self, session: Session, how: str) -> None:
        """Count and log the end of a session that the actor has chosen, or that its connection has caused."""
        self._metrics.sessions_left += not session.moved_to
        if self._goodbye is None and session.has_joined:
            self._say(f"learner: {session.name} {f'moved to {session.moved_to}' if session.moved_to else how}")

    def _evict(self, session: Session, error: Refused) -> None:
        """End a session at once; its stream ends when the event loop gets to it. Must not be called during a batch."""
        session.evicted = error
        self._end(session)
        self.connections[session.id].limit.reschedule(time.monotonic())

    def _places_for(self, concerned: list[Session]) -> list[str]:
        """Return an address for each session that is to move. Raises InvalidMessage, before anything has changed."""
        if fixed := [session.name for session in concerned if not session.follows_redirects]:
            others = f" and {len(fixed) - 1} more" if len(fixed) > 1 else ""
            raise InvalidMessage(
                f"move: expected actors that follow redirects, saw {fixed[0]}{others} with {MAX_REDIRECTS} in Hello; "
                "no actor was moved; move the others by name, or let this one leave by `seedrl control drain`"
            )
        actors, envs = len(concerned), self._config.actors.envs
        places = self._balance.elsewhere(envs, actors) if self._balance.has_others else None
        if places is None:
            raise InvalidMessage(
                f"move: expected another endpoint that is open and has room for {actors} × {envs} environments, "
                "saw none; no actor was moved"
            )
        return places

    def _move(self, session: Session, address: str, reason: str, words: str) -> None:
        """End a session and redirect its actor. Rows that the actor sends before it knows are read and counted."""
        session.moved_to = address
        self._metrics.sessions_redirected[reason] += 1
        connection = self.connections[session.id]
        connection.send(Control(Command.REDIRECT, words, address))
        self._end(session)
        connection.limit.reschedule(time.monotonic() + MOVE_SECONDS)


def _joined(answers: list[Answer]) -> Arrays:
    """Return their actions, one after the other."""
    first = answers[0][1]
    if len(answers) == 1:
        return first
    columns = zip(*(leaves(action) for _, action in answers), strict=True)
    return as_tree(first, [np.concatenate(column) for column in columns])


def _loss(session: Session) -> str:
    """Return how a session was lost. gRPC does not say whether the actor cancelled its call or the connection broke."""
    silent = time.monotonic() - session.traffic.heard
    why = f"; an actor has to answer pings within {PING_PATIENCE:g} s" if silent >= PING_PATIENCE else ""
    return f"left: its call was cancelled or its connection closed {silent:.1f} s after its last message{why}"
