"""The gRPC end of a learner: ports, TLS, health, reflection, and the event loop. Knows nothing of what sessions do.

One asyncio loop in the thread `server` runs everything: the streams, which `serving.protocol` serves, and the batches.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from seedrl.config import LearnerConfig
from seedrl.errors import ConfigError, Refused
from seedrl.metrics import ServingMetrics
from seedrl.serving.balance import Balance, own_address
from seedrl.serving.guard import TokenGuard
from seedrl.serving.protocol import CANCEL_SECONDS, GOODBYE_SECONDS, SPARE_STREAMS, SessionProtocol
from seedrl.serving.refusals import RefusalLog
from seedrl.status import Status
from seedrl.wire.address import refuse_if_taken
from seedrl.wire.channel import SERVICE, server_options, service_handler
from seedrl.wire.codes import code_of
from seedrl.wire.control import parse_control_request, serialize_control_response
from seedrl.wire.messages import ActorMessage, Command, Control, LearnerMessage
from seedrl.wire.security import exposures, is_socket
from seedrl.wire.status import serialize_status
from seedrl.wire.tls import server_credentials
from seedrl.wire.tokens import Tokens, open_to_others

READY = ("", SERVICE, "ready")  # health services that serve once the learner is restored, warmed up and not draining
LIVE = "live"  # the health service that serves while batches run
SPARE_RPCS = 64  # calls beyond the streams: health, status, streams that are refused
INTERNAL = "internal error of the learner"  # the only details of one that a peer gets
HealthStatus = health_pb2.HealthCheckResponse

# Failures of a stream are logged in one line by the protocol. gRPC would add a traceback for every peer that vanishes.
logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)


class GrpcStream:
    """A Stream over gRPC. Its methods return gRPC's own awaitables, so that it costs nothing per message."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def read(self) -> Awaitable[ActorMessage | None]:
        message: Awaitable[ActorMessage | None] = self._context.read()  # gRPC's end of a stream is false
        return message

    def write(self, message: LearnerMessage) -> Awaitable[None]:
        written: Awaitable[None] = self._context.write(message)
        return written

    def abort(self, error: Exception) -> Awaitable[None]:
        """Only the errors of a peer are explained to it."""
        code, details = grpc.StatusCode.INTERNAL, INTERNAL
        if isinstance(error, Refused):
            code, details = code_of(error), str(error)
        ended: Awaitable[None] = self._context.abort(code, details)
        return ended

    def peer(self) -> str:
        return str(self._context.peer())


class Server:
    """The public methods may be called from any thread."""

    def __init__(
        self,
        config: LearnerConfig,
        protocol: SessionProtocol,
        balance: Balance,
        metrics: ServingMetrics,
        on_failure: Callable[[BaseException], None],
        say: Callable[[str], None],
        describe: Callable[[], Status],
    ) -> None:
        self._config = config
        self._protocol = protocol
        self._balance = balance
        self._metrics = metrics
        self._on_failure = on_failure
        self._say = say
        self._describe = describe
        self._loop = asyncio.new_event_loop()
        self._tokens = Tokens(config.security, say=lambda words: say(f"learner: {words}"))
        self._health = health.aio.HealthServicer()
        self._stopping = asyncio.Event()
        self._address = config.listen or config.socket
        self._bound: Future[str] = Future()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def start(self) -> str:
        """Start to serve; return the address bound. Raises ConfigError if that fails."""
        for exposure in exposures(self._config):
            self._say(f"learner: INSECURE, as was allowed: {exposure}")
        for name in open_to_others(self._config.security):
            self._say(f"learner: other users of this machine may read {name}; chmod 600 it")
        self._thread.start()
        return self._bound.result(timeout=10)

    def set_ready(self, ready: bool) -> None:
        self._call(self._set_health, READY, HealthStatus.SERVING if ready else HealthStatus.NOT_SERVING)

    def set_live(self, live: bool) -> None:
        self._call(self._set_health, (LIVE,), HealthStatus.SERVING if live else HealthStatus.NOT_SERVING)

    def run(self, work: Coroutine[Any, Any, None]) -> "Future[None]":
        """Run something else in the server thread; its failure is a failure of the server."""
        return asyncio.run_coroutine_threadsafe(self._guard(work), self._loop)

    def rebalance(self) -> None:
        """Redirect one actor if there have been far too many here for a while. To be called twice a second."""
        self._call(self._protocol.move_one_if_overloaded)

    def stop(self, command: Command, reason: str) -> None:
        """Ask every actor to leave, give them a moment, and end."""
        self._call(self._stop, Control(command, reason))
        self._thread.join(timeout=GOODBYE_SECONDS + 5)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and so is everything that ran in it
            self._loop.call_soon_threadsafe(function, *arguments)

    # Everything below runs in the server thread.

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # ends the remaining tasks as well
                runner.run(self._serve())
        except BaseException as error:
            if not self._bound.done():
                self._bound.set_exception(error)
            else:
                self._on_failure(error)

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._on_failure(error)

    async def _serve(self) -> None:
        for name in READY:
            await self._health.set(name, HealthStatus.NOT_SERVING)
        await self._health.set(LIVE, HealthStatus.SERVING)
        server = await self._listen()
        self._balance.address = own_address(self._config.ranks.advertise, self._address)
        self._bound.set_result(self._address)
        await self._until_spaces_are_known()
        if not self._stopping.is_set() and self._protocol.longest_message > self._protocol.room:
            await server.stop(grace=CANCEL_SECONDS)
            server = await self._listen()
        await self._stopping.wait()
        await self._health.enter_graceful_shutdown()
        await self._protocol.say_goodbye()
        await server.stop(grace=0.5)

    async def _until_spaces_are_known(self) -> None:
        """Wait for the first Ready, or for the end."""
        stopping = self._loop.create_task(self._stopping.wait())
        known = asyncio.wrap_future(self._protocol.spec)
        await asyncio.wait((stopping, known), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()

    async def _listen(self) -> grpc.aio.Server:
        """Return a server that reads messages of the length that is needed. gRPC's limit is one for a whole server."""
        self._protocol.room = self._protocol.longest_message
        serving = self._config.serving
        server = grpc.aio.server(
            interceptors=[TokenGuard(self._tokens, self._metrics, RefusalLog(self._say))] if self._tokens else [],
            options=server_options(self._protocol.room),
            maximum_concurrent_rpcs=serving.max_slots + SPARE_STREAMS + SPARE_RPCS,
        )
        server.add_generic_rpc_handlers((service_handler(self._stream, self._status, self._control),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        self._bind(server)
        await server.start()
        return server

    def _bind(self, server: grpc.aio.Server) -> None:
        """Listen on `socket` and `listen`. If `listen` names no port, the one that is found stays the same."""
        if self._config.socket:
            self._add_port(server, self._config.socket, "socket")
        if self._config.listen:
            port = self._add_port(server, self._address, "listen")
            if not is_socket(self._address):
                self._address = f"{self._address.rpartition(':')[0]}:{port}"

    def _add_port(self, server: grpc.aio.Server, address: str, setting: str) -> int:
        """Listen, with TLS if there is a certificate. A unix socket needs none: its file's mode protects it."""
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

    def _set_health(self, names: tuple[str, ...], value: int) -> None:
        for name in names:
            self._loop.create_task(self._health.set(name, value))

    def _stop(self, goodbye: Control) -> None:
        self._protocol.drain(goodbye)
        self._stopping.set()

    async def _stream(self, _: Any, context: Any) -> None:
        await self._protocol.serve(GrpcStream(context))

    async def _status(self, _: bytes, context: Any) -> bytes:
        try:
            return serialize_status(self._describe())
        except Exception as error:
            self._say(f"learner: the status could not be described: {error!r}")
            await GrpcStream(context).abort(error)
            raise

    async def _control(self, request: bytes, context: Any) -> bytes:
        try:
            results = self._protocol.control(parse_control_request(request), context.peer())
            return serialize_control_response(results)
        except Exception as error:
            if not isinstance(error, Refused):
                self._say(f"learner: a control request failed: {error!r}")
            await GrpcStream(context).abort(error)
            raise
