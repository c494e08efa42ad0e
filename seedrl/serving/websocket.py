"""WebSocket clients that send msgpack observations, OpenPI's convention, as sessions of one environment each.

A client is a Stream like any other: its rows share batches with those of all clients, and its recurrent state and frame
stack stay in its slot until it leaves. Knows nothing of models, batches or files.
"""

import asyncio
import http
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from seedrl.config import SecurityConfig
from seedrl.errors import InvalidMessage, Refused
from seedrl.rows import RESET, TRUNCATED
from seedrl.serving.protocol import SessionProtocol
from seedrl.specs import Arrays, EnvSpec, leaves, names
from seedrl.wire.channel import SCHEME
from seedrl.wire.codec import ENV_ID, FLAGS, REWARD, decode_act
from seedrl.wire.messages import (
    MAX_REDIRECTS,
    Act,
    ActorMessage,
    Control,
    Hello,
    LearnerMessage,
    Ready,
    StepParts,
    Welcome,
)
from seedrl.wire.packed import OBSERVATION, longest_message, observation_in, pack, unpack
from seedrl.wire.tls import server_context
from seedrl.wire.tokens import Tokens

RESET_KEY = "reset"  # a message with a true one begins an episode
SCHEMES = ("Api-Key ", SCHEME)  # how OpenPI's clients show a token, and how everybody else does
INTERNAL = "internal error of the server"  # the only details of one that a client gets
PAUSING = ("PAUSE", "RESUME", "RESET", "REDIRECT")  # commands that mean nothing to a client that only asks


class WebSocketStream:
    """A Stream over a WebSocket. Owned by the server thread.

    The client sends an observation and waits for its action, so the next message is read when the last is answered. An
    episode that the client ends by `reset` is ended here by a TRUNCATED row, whose action it does not see.
    """

    def __init__(self, connection: ServerConnection, spec: EnvSpec) -> None:
        self._connection = connection
        self._spec = spec
        self._answered = asyncio.Event()
        self._answered.set()
        self._ahead: list[ActorMessage] = [self._hello(), Ready(spec)]  # read before anything of the client's
        self._requests = 0
        self._began = 0.0  # when the newest message came
        self._is_over = False  # the row in flight ends an episode, and the client waits for the one after it

    async def read(self) -> ActorMessage | None:
        """Return the next message; None once the client has left."""
        await self._answered.wait()
        if self._ahead:
            message = self._ahead.pop(0)
        else:
            try:
                data = await self._connection.recv()
            except ConnectionClosed:
                return None
            self._began = time.monotonic()
            message = self._step(data)
        if isinstance(message, StepParts):
            self._answered.clear()
        return message

    async def write(self, message: LearnerMessage) -> None:
        if isinstance(message, Act):
            await self._answer(message)
        elif isinstance(message, Welcome):
            await self._send(pack(self._metadata(message)))
        elif isinstance(message, Control) and message.command.name not in PAUSING:
            await self._connection.close(reason=message.reason[:100])
            self._answered.set()

    async def abort(self, error: Exception) -> None:
        """Send the reason as a text, which clients raise as an error, and close."""
        await self._send(str(error) if isinstance(error, Refused) else INTERNAL)
        await self._connection.close(code=1008 if isinstance(error, Refused) else 1011)

    def peer(self) -> str:
        address = self._connection.remote_address
        return f"{address[0]}:{address[1]}" if address else "a WebSocket client"

    def _hello(self) -> Hello:
        """Return the greeting of a client that is never redirected and shares no memory."""
        return Hello(f"websocket-{self.peer()}", instance=secrets.token_hex(8), redirects=MAX_REDIRECTS)

    def _step(self, data: str | bytes) -> StepParts:
        if isinstance(data, str):
            raise InvalidMessage("message: expected a binary message, saw a text")
        message = unpack(data)
        observation = observation_in(message, self._spec)
        is_first = self._requests == 0
        if not is_first and RESET_KEY not in names(self._spec.observation) and message.get(RESET_KEY):
            self._is_over = True
            self._ahead.append(self._row(observation, RESET))
            return self._row(observation, TRUNCATED)
        return self._row(observation, RESET if is_first else 0)

    def _row(self, observation: list[Any], flags: int) -> StepParts:
        self._requests += 1
        return StepParts(
            request_id=self._requests,
            env_id=np.zeros(1, ENV_ID).tobytes(),
            observation=[leaf.tobytes() for leaf in observation],
            reward=np.zeros(1, REWARD).tobytes(),
            flags=np.array([flags], FLAGS).tobytes(),
        )

    async def _answer(self, act: Act) -> None:
        if not self._is_over:
            actions: Arrays = decode_act(act, self._spec, rows=1)
            milliseconds = 1000 * (time.monotonic() - self._began)
            await self._send(pack({"actions": actions, "server_timing": {"infer_ms": milliseconds}}))
        self._is_over = False
        self._answered.set()

    async def _send(self, data: str | bytes) -> None:
        try:
            await self._connection.send(data)
        except ConnectionClosed:  # the reader notices it as well
            self._answered.set()

    def _metadata(self, welcome: Welcome) -> dict[str, Any]:
        """Return what a client is told first: the environment, and what to send."""
        spec = self._spec
        keys = names(spec.observation) if isinstance(spec.observation, dict) else [OBSERVATION]
        observation = {key: str(leaf) for key, leaf in zip(keys, leaves(spec.observation), strict=True)}
        return {"env": welcome.env_id, "observation": observation, "action": str(spec.action), "action_horizon": 1}


class WebSocketServer:
    """Listens for WebSocket clients in the server thread; `bound` has its address once it does."""

    def __init__(
        self, address: str, security: SecurityConfig, protocol: SessionProtocol, say: Callable[[str], None]
    ) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._security = security
        self._protocol = protocol
        self._say = say
        self._tokens = Tokens(security, say=lambda words: say(f"serve: {words}"))
        self.bound: Future[str] = Future()

    async def run(self) -> None:
        """Serve until this is cancelled."""
        spec = self._protocol.spec.result()
        context = server_context(self._security) if self._security.certificate_file else None
        async with serve(
            lambda connection: self._serve(connection, spec),
            self._host.strip("[]"),
            int(self._port),
            ssl=context,
            compression=None,
            max_size=longest_message(spec),
            origins=[None],  # pages of other sites must not use a browser's way to this machine
            process_request=self._admit,
        ) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            self.bound.set_result(f"{'wss' if context else 'ws'}://{self._host}:{port}")
            await server.wait_closed()

    async def _serve(self, connection: ServerConnection, spec: EnvSpec) -> None:
        await self._protocol.serve(WebSocketStream(connection, spec), envs=1)

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer a request for health; refuse one without a valid token if there are tokens."""
        if request.path == "/healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        shown = request.headers.get("Authorization", "")
        tokens = [shown.removeprefix(scheme) for scheme in SCHEMES if shown.startswith(scheme)]
        if self._tokens and not any(map(self._tokens.accepts, tokens)):
            self._say("serve: refused a WebSocket client, which showed no valid token")
            return connection.respond(http.HTTPStatus.UNAUTHORIZED, "a valid token is needed\n")
        return None
