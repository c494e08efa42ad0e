"""The gRPC end of the stream: messages in, requests to the batcher; answers out. Knows nothing of models.

One asyncio loop in the thread `server` runs every session: a reader, and a writer that drains the session's outbox.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from seedrl.config import LearnerConfig
from seedrl.errors import ConfigError, InvalidMessage, NoCapacity, Refused, Superseded, TooLate
from seedrl.metrics import ServingMetrics, Stopwatch
from seedrl.serving.balance import Balance, own_address
from seedrl.serving.batcher import Batcher
from seedrl.serving.guard import TokenGuard
from seedrl.serving.inference import Answer
from seedrl.serving.sessions import OTHER_BYTES, Request, Session, SessionTable
from seedrl.specs import Arrays, EnvSpec, as_tree, leaves
from seedrl.status import DRAINED, Status
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire import codec
from seedrl.wire.address import refuse_if_taken
from seedrl.wire.channel import SERVICE, server_options, service_handler
from seedrl.wire.framing import StepParts
from seedrl.wire.security import exposures, is_socket
from seedrl.wire.status import code_of
from seedrl.wire.tls import server_credentials
from seedrl.wire.tokens import Tokens, open_to_others

READY = ("", SERVICE, "ready")  # names that health is asked by: restored, warmed up, not draining
LIVE = "live"  # batches go on
HELLO_SECONDS = 10.0  # from connecting to the first message
READY_SECONDS = 120.0  # to build a pool
SPARE_STREAMS = 64  # streams beyond one per slot: of actors that have not said hello
SPARE_RPCS = 64  # calls beyond those: health, status, streams that are refused
MOVE_SECONDS = 5.0  # for an actor to end its half of the stream when it is sent elsewhere
GOODBYE_SECONDS = 2.0  # for actors to leave when asked to
INTERNAL = "internal error of the learner"  # all that a peer is told of one

Outbox = asyncio.Queue[tuple[pb.StreamResponse, int]]  # a message, and the rows that it answers

# What goes wrong in a stream is said here, in one line. gRPC would add a traceback for every peer that vanishes.
logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)


class Server:
    """The public methods may be called from any thread, `answer` only from the server thread."""

    def __init__(
        self,
        config: LearnerConfig,
        sessions: SessionTable,
        balance: Balance,
        batcher: Batcher[Request],
        metrics: ServingMetrics,
        on_failure: Callable[[BaseException], None],
        say: Callable[[str], None],
        describe: Callable[[], Status],
    ) -> None:
        self._config = config
        self._sessions = sessions
        self._balance = balance
        self._batcher = batcher
        self._metrics = metrics
        self._on_failure = on_failure
        self._say = say
        self._describe = describe
        self._streams = 0
        self._outboxes: dict[int, Outbox] = {}
        self._limits: dict[int, asyncio.Timeout] = {}  # session id → what ends its stream when it runs out
        self._loop = asyncio.new_event_loop()
        self._tokens = Tokens(config.security, say=lambda words: say(f"learner: {words}"))
        self._health = health.aio.HealthServicer()
        self._farewell: asyncio.Future[pb.StreamResponse] = self._loop.create_future()
        self._bound: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def start(self) -> str:
        """Serves from now on; returns the address bound. Raises ConfigError if that fails."""
        for exposure in exposures(self._config):
            self._say(f"learner: INSECURE, as was allowed: {exposure}")
        for name in open_to_others(self._config.security):
            self._say(f"learner: other users of this machine may read {name}; chmod 600 it")
        self._thread.start()
        return self._bound.result(timeout=10)

    def set_ready(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse
        self._call(self._set_health, dict.fromkeys(READY, status.SERVING if ready else status.NOT_SERVING))

    def set_live(self, live: bool) -> None:
        status = health_pb2.HealthCheckResponse
        self._call(self._set_health, {LIVE: status.SERVING if live else status.NOT_SERVING})

    def run(self, work: Coroutine[Any, Any, None]) -> "Future[None]":
        """Runs something in the server thread, besides the streams; a failure of it is one of the server."""
        return asyncio.run_coroutine_threadsafe(self._guard(work), self._loop)

    def rebalance(self) -> None:
        """Sends one actor elsewhere if there have been far too many here for a while. To be called now and then."""
        self._call(self._move_one_if_overloaded, None)

    def stop(self, command: pb.Control.Command, reason: str) -> None:
        """Tells every actor to leave, gives them a moment, and ends."""
        self._call(self._say_goodbye, codec.encode_control(command, reason))
        self._thread.join(timeout=GOODBYE_SECONDS + 5)

    def _call(self, function: Callable[[Any], None], argument: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is nobody left to tell
            self._loop.call_soon_threadsafe(function, argument)

    # Everything below runs in the server thread.

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._on_failure(error)

    def answer(self, answers: list[Answer]) -> None:
        """Sends actions back, each session's in one message."""
        by_session: dict[int, list[Answer]] = {}
        for request, action in answers:
            request.session.answered(request.content, request.buffer)
            by_session.setdefault(request.session.id, []).append((request, action))
        for session_id, own in by_session.items():
            outbox = self._outboxes.get(session_id)
            if outbox is not None:
                message = codec.encode_act([request.request_id for request, _ in own], _joined(own))
                rows = sum(request.rows for request, _ in own)
                outbox.put_nowait((message, rows))
                own[0][0].session.unsent += rows
                self._metrics.sent_bytes += sum(map(len, message.act.action))

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # ends what is still going on as well
                runner.run(self._serve())
        except BaseException as error:
            if not self._bound.done():
                self._bound.set_exception(error)
            else:
                self._on_failure(error)

    def _set_health(self, values: dict[str, int]) -> None:
        for name, value in values.items():
            self._loop.create_task(self._health.set(name, value))

    async def _serve(self) -> None:
        serving = self._config.serving
        server = grpc.aio.server(
            interceptors=[TokenGuard(self._tokens, self._metrics, self._say)] if self._tokens else [],
            options=server_options(serving.max_message_mb),
            maximum_concurrent_rpcs=serving.max_slots + SPARE_STREAMS + SPARE_RPCS,
        )
        server.add_generic_rpc_handlers((service_handler(self._stream, self._status, self._control),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        for name in READY:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        address = self._bind(server)
        await server.start()
        self._balance.address = own_address(self._config.ranks.advertise, address)
        self._bound.set_result(address)
        goodbye = await self._farewell
        await self._health.enter_graceful_shutdown()
        for outbox in self._outboxes.values():
            outbox.put_nowait((goodbye, 0))
        await self._wait_until_all_left(GOODBYE_SECONDS)
        await server.stop(grace=0.5)

    def _bind(self, server: grpc.aio.Server) -> str:
        """Returns the address of `listen`, with the port that was found if it named none."""
        if self._config.socket:
            self._add_port(server, self._config.socket, "socket")
        listen = self._config.listen
        port = self._add_port(server, listen, "listen")
        return listen if is_socket(listen) else f"{listen.rpartition(':')[0]}:{port}"

    def _add_port(self, server: grpc.aio.Server, address: str, setting: str) -> int:
        """With TLS if there is a certificate; a unix socket does without: who may open it says who may connect."""
        security = self._config.security
        refuse_if_taken(address, setting)
        try:
            if is_socket(address) or not security.certificate_file:
                return int(server.add_insecure_port(address))
            return int(server.add_secure_port(address, server_credentials(security)))
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {address}: the port is in use or the address is not of this machine; set {setting}=…"
            ) from error

    def _say_goodbye(self, goodbye: pb.StreamResponse) -> None:
        if not self._farewell.done():
            self._farewell.set_result(goodbye)
            self._sessions.is_open = False
            self._sessions.on_leave = lambda session: None  # what is under way at the end was not lost by a session

    async def _wait_until_all_left(self, seconds: float) -> None:
        deadline = self._loop.time() + seconds
        while self._outboxes and self._loop.time() < deadline:
            await asyncio.sleep(0.02)

    async def _stream(self, _: Any, context: Any) -> None:
        """One session, from Hello to the end of the stream."""
        if self._farewell.done():
            await context.write(self._farewell.result())
            return
        counted = self._metrics.sessions_refused
        session: Session | None = None
        self._streams += 1
        try:
            self._expect_room()
            hello = await _receive(context, "hello", HELLO_SECONDS)
            if hello is None:
                return
            greeting = codec.decode_hello(hello)
            self._make_way(greeting)
            if address := self._better_place(greeting):
                await context.write(codec.encode_redirect(address, "another endpoint has more room"))
                return
            session, job = self._admit(greeting, context.peer())
            counted = self._metrics.sessions_evicted
            await self._session(context, session, job, greeting)
            self._metrics.sessions_left += not session.moved_to
        except asyncio.CancelledError:
            self._metrics.sessions_left += session is not None and not session.moved_to
            raise
        except Refused as error:
            counted[error.reason] += 1
            self._say(f"learner: refused an actor: {error}")
            await context.abort(code_of(error), str(error))
        except Exception as error:  # ours, and no business of the peer's
            counted["internal"] += 1
            self._say(f"learner: a session failed: {error!r}")
            await context.abort(grpc.StatusCode.INTERNAL, INTERNAL)
        finally:
            self._streams -= 1

    async def _status(self, _: Any, context: Any) -> pb.StatusResponse:
        try:
            return codec.encode_status(self._describe())
        except Exception as error:  # ours, and no business of the peer's
            self._say(f"learner: no status could be told: {error!r}")
            await context.abort(grpc.StatusCode.INTERNAL, INTERNAL)
            raise

    async def _control(self, request: pb.ControlRequest, context: Any) -> pb.ControlResponse:
        try:
            order = codec.decode_control_request(request)
            places = self._places_for(order) if order.command == pb.Control.COMMAND_REDIRECT else []
            concerned = self._sessions.obey(order)
        except Refused as error:
            await context.abort(code_of(error), str(error))
            raise
        words = codec.describe_request(order)
        self._say(f"learner: {context.peer()} wants of {order.actor or 'all actors'}: {words}")
        reason = DRAINED if order.command == pb.Control.COMMAND_END else f"Asked to: {words}"
        if order.command == pb.Control.COMMAND_REDIRECT:
            for session, place in zip(concerned, places, strict=True):
                self._move(session, place, "drain", reason)
        elif order.command:
            for session in concerned:
                self._outboxes[session.id].put_nowait((codec.encode_control(order.command, reason), 0))
        return pb.ControlResponse(actors=len(concerned))

    def _expect_room(self) -> None:
        limit = self._config.serving.max_slots + SPARE_STREAMS
        if self._streams > limit:
            raise NoCapacity(f"{limit} streams are open, which is the limit; raise serving.max_slots on the learner")

    def _make_way(self, greeting: codec.Hello) -> None:
        """An older session of the same process makes room first. Raises Superseded for one that is not newer."""
        older = self._sessions.superseded_by(greeting)
        if older is not None:
            self._evict(older, Superseded("superseded by a newer session of the same actor"))

    def _better_place(self, greeting: codec.Hello) -> str | None:
        """The address of another endpoint that an actor is to use; None if it is served, or refused, here."""
        if greeting.redirects >= codec.MAX_REDIRECTS:
            return None
        address = self._balance.choose(self._config.actors.envs, is_sent=greeting.redirects > 0)
        if address is not None:
            self._metrics.sessions_redirected["balance" if self._sessions.is_open else "closed"] += 1
        return address

    def _places_for(self, order: codec.ControlRequest) -> list[str]:
        """Where those go that are to move. Raises InvalidMessage, before anything has changed, if they cannot."""
        actors, envs = len(self._sessions.concerned_by(order)), self._config.actors.envs
        places = self._balance.elsewhere(envs, actors) if self._balance.has_others else None
        if places is None:
            raise InvalidMessage(
                f"move: expected another endpoint that is open and has room for {actors} × {envs} environments, "
                "saw none; nobody was moved"
            )
        return places

    def _move_one_if_overloaded(self, _: None) -> None:
        """The newest, so that the others are left alone for long."""
        address = self._balance.overload()
        if address is not None and self._sessions.open:
            newest = self._sessions.open[max(self._sessions.open)]
            self._move(newest, address, "rebalance", "there are too many here")

    def _move(self, session: Session, address: str, reason: str, words: str) -> None:
        """Ends a session, to go on elsewhere. What its actor has sent until it hears of that is read and counted."""
        session.moved_to = address
        self._metrics.sessions_redirected[reason] += 1
        self._outboxes[session.id].put_nowait((codec.encode_redirect(address, words), 0))
        self._end(session)
        self._limits[session.id].reschedule(self._loop.time() + MOVE_SECONDS)

    def _admit(self, greeting: codec.Hello, peer: str) -> tuple[Session, codec.Welcome]:
        """A session for an actor, if there is room."""
        joined = self._sessions.join(greeting, peer)
        self._metrics.sessions_joined += 1
        self._metrics.actors_env_failures += bool(greeting.env_failure)
        return joined

    async def _session(self, context: Any, session: Session, job: codec.Welcome, greeting: codec.Hello) -> None:
        """From Welcome to the end of the stream."""
        outbox = self._outboxes[session.id] = asyncio.Queue()
        writer = self._loop.create_task(_drain(outbox, session, context), name=f"writer-{session.id}")
        try:
            async with asyncio.timeout(None) as self._limits[session.id]:
                outbox.put_nowait((self._farewell.result() if self._farewell.done() else codec.encode_welcome(job), 0))
                ready = await _receive(context, "ready", READY_SECONDS)
                if ready is not None:
                    await self._serve_session(context, session, codec.decode_ready(ready), greeting)
        except TimeoutError:
            if session.evicted is not None:
                raise session.evicted from None
            assert session.moved_to  # and its actor has not left: the stream ends without it
        finally:
            writer.cancel()
            del self._outboxes[session.id], self._limits[session.id]
            self._end(session)
            if not self._farewell.done():
                self._say(f"learner: {session.name} {f'moved to {session.moved_to}' if session.moved_to else 'left'}")

    async def _serve_session(self, context: Any, session: Session, spec: EnvSpec, greeting: codec.Hello) -> None:
        """From Ready to the end of the stream."""
        self._sessions.agree(spec)
        memory = self._sessions.share(session, greeting.host) if session.alive else None
        if memory is not None:
            self._outboxes[session.id].put_nowait((codec.encode_memory(memory.offer), 0))
        why = f"; before that, {greeting.env_failure}" if greeting.env_failure else ""
        self._say(f"learner: {session.name} joined with {len(session.slots)} environments{why}")
        session.heard = self._loop.time()
        watch = self._loop.create_task(self._watch(session), name=f"watch-{session.id}")
        try:
            await self._read(context, session, spec)
        finally:
            watch.cancel()

    def _end(self, session: Session) -> None:
        """Nothing of it stays behind: no lease, no unfinished unroll, no row that waits."""
        self._sessions.leave(session)
        dropped = self._batcher.drop(lambda request: request.session is session)
        self._metrics.rows_dropped["session_ended"] += 0 if self._farewell.done() else dropped

    def _evict(self, session: Session, error: Refused) -> None:
        """Ends somebody's session at once; its stream ends when it gets its turn. Not while a batch runs."""
        session.evicted = error
        self._end(session)
        self._limits[session.id].reschedule(self._loop.time())

    async def _watch(self, session: Session) -> None:
        """Evicts an actor that owes a Step for too long. Keepalive sees machines that are gone, and nothing else."""
        limit = self._config.serving.max_silence
        silent = 0.0
        while silent < limit:
            await asyncio.sleep(limit - silent)
            since = session.owes_since()
            silent = 0.0 if since is None else self._loop.time() - since
        if limit and session.alive:
            self._evict(session, TooLate(f"message: expected step within {limit:g} s, saw nothing for {silent:.0f} s"))

    async def _read(self, context: Any, session: Session, spec: EnvSpec) -> None:
        spent = self._metrics.serving_seconds
        while (message := await context.read()) is not grpc.aio.EOF:
            timer = Stopwatch(spent)
            session.heard = timer.last
            if isinstance(message, StepParts):
                session.expect_reader()
                self._take(self._request(message, session, spec))
            elif message.HasField("report"):
                self._count_report(session.measure(codec.decode_report(message.report)))
            else:
                raise InvalidMessage(f"message: expected step or report, saw {_kind(message)}")
            timer.lap("read")

    def _take(self, request: Request) -> None:
        if request.session.alive:
            self._batcher.submit(request)
        else:  # it was sent before its actor heard that the session moves
            self._metrics.rows_dropped["session_ended"] += request.rows

    def _request(self, step: StepParts, session: Session, spec: EnvSpec) -> Request:
        rows = codec.decode_step(step, spec, len(session.slots), session.memory)
        session.admit(rows, step.buffer)
        session.transport = "memory" if step.buffer else "message"
        self._metrics.received_bytes[session.transport] += len(rows.flags) * (spec.row_bytes + OTHER_BYTES)
        return Request(session, step.request_id, rows, session.slots[rows.env_id], step.buffer, session.heard)

    def _count_report(self, new: codec.Report) -> None:
        metrics = self._metrics
        metrics.actors_steps += new.steps
        metrics.actors_env_seconds += new.env_seconds
        metrics.actors_wait_seconds += new.wait_seconds
        metrics.actors_requests += new.requests
        metrics.actors_round_trip_seconds += new.round_trip_seconds
        metrics.actors_cpu_seconds += new.cpu_seconds
        metrics.actors_reconnects += new.reconnects > 0  # the first report of a session that is not its first


def _joined(answers: list[Answer]) -> Arrays:
    """Their actions, one after the other."""
    first = answers[0][1]
    if len(answers) == 1:
        return first
    columns = zip(*(leaves(action) for _, action in answers), strict=True)
    return as_tree(first, [np.concatenate(column) for column in columns])


async def _receive(context: Any, kind: str, seconds: float) -> Any:
    """The next message, which has to be of this kind and to come in time; None if the actor has left."""
    try:
        message = await asyncio.wait_for(context.read(), seconds)
    except TimeoutError:
        raise TooLate(f"message: expected {kind} within {seconds:.0f} s, saw nothing") from None
    if message is grpc.aio.EOF:
        return None
    if _kind(message) != kind:
        raise InvalidMessage(f"message: expected {kind}, saw {_kind(message)}")
    return getattr(message, kind)


def _kind(message: pb.StreamRequest | StepParts) -> str | None:
    return "step" if isinstance(message, StepParts) else message.WhichOneof("message")


async def _drain(outbox: Outbox, session: Session, context: Any) -> None:
    while True:
        message, rows = await outbox.get()
        session.unsent -= rows
        await context.write(message)  # waits for an actor that does not read
