"""Turns away every call without a valid token, before anything is read or made for it. Knows nothing of sessions."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from seedrl.errors import Unauthenticated
from seedrl.metrics import ServingMetrics
from seedrl.wire.channel import AUTHORIZATION, SCHEME
from seedrl.wire.codes import code_of
from seedrl.wire.tokens import Tokens

QUIET_SECONDS = 60.0  # between two lines about calls that were turned away: strangers must not fill the log
REFUSAL = Unauthenticated("this learner asks for a token and saw none that is valid; see security.token_file")


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """For every method there is or is not: streams, status, health, reflection. Owned by the server thread."""

    def __init__(
        self,
        tokens: Tokens,
        metrics: ServingMetrics,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokens = tokens
        self._metrics = metrics
        self._say = say
        self._clock = clock
        self._quiet_until = float("-inf")
        # A stream in both directions, whatever was called: it is refused without waiting for a message.
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        return await continuation(call) if self._tokens.accepts(token_in(call.invocation_metadata)) else self._refusal

    async def _refuse(self, _: Any, context: Any) -> None:
        refused = self._metrics.sessions_refused
        refused[REFUSAL.reason] += 1
        count = refused[REFUSAL.reason]
        if self._clock() >= self._quiet_until:
            self._quiet_until = self._clock() + QUIET_SECONDS
            self._say(f"learner: refused {context.peer()}, which showed no valid token; {count:,} calls so far")
        await context.abort(code_of(REFUSAL), str(REFUSAL))


def token_in(metadata: Any) -> str:
    """What a call shows; empty for nothing."""
    shown = str(dict(metadata or ()).get(AUTHORIZATION, ""))
    return shown.removeprefix(SCHEME) if shown.startswith(SCHEME) else ""
