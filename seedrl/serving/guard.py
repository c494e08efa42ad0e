"""Refuses every call without a valid token, before anything is read or made for it. Knows nothing of sessions."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from seedrl.errors import Unauthenticated
from seedrl.metrics import ServingMetrics
from seedrl.serving.refusals import RefusalLog
from seedrl.wire.channel import AUTHORIZATION, SCHEME
from seedrl.wire.codes import code_of
from seedrl.wire.tokens import Tokens

REFUSAL = Unauthenticated("this learner asks for a token and saw none that is valid; see security.token_file")


class TokenGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Guards every method, known or not: streams, status, health, reflection. Owned by the server thread."""

    def __init__(
        self,
        tokens: Tokens,
        metrics: ServingMetrics,
        log: RefusalLog,
    ) -> None:
        self._tokens = tokens
        self._metrics = metrics
        self._log = log
        # A stream in both directions, whatever was called: it is refused without waiting for a message.
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], call: Any) -> Any:
        return await continuation(call) if self._tokens.accepts(token_in(call.invocation_metadata)) else self._refusal

    async def _refuse(self, _: Any, context: Any) -> None:
        self._metrics.sessions_refused[REFUSAL.reason] += 1
        self._log(f"learner: refused {context.peer()}, which showed no valid token")
        await context.abort(code_of(REFUSAL), str(REFUSAL))


def token_in(metadata: Any) -> str:
    """Return the token that a call shows; empty if it shows none."""
    shown = str(dict(metadata or ()).get(AUTHORIZATION, ""))
    return shown.removeprefix(SCHEME) if shown.startswith(SCHEME) else ""
