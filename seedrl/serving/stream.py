"""The learner's end of a stream: what is read from it, and what waits to be sent. Knows nothing of the protocol."""

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from seedrl.errors import InvalidMessage, TooLate
from seedrl.serving.sessions import Session
from seedrl.wire.messages import ActorMessage, Hello, LearnerMessage, Ready, StepParts

Message = TypeVar("Message", Hello, Ready)


class Stream(Protocol):
    """The learner's end of one stream. `read` returns something false once the actor has ended its half."""

    def read(self) -> Awaitable[ActorMessage | None]: ...

    def write(self, message: LearnerMessage) -> Awaitable[None]: ...

    def abort(self, error: Exception) -> Awaitable[None]:
        """End the stream with a status that explains the error."""
        ...

    def peer(self) -> str: ...


@dataclass(eq=False, slots=True)
class Connection:
    """The stream of an open session. Owned by the server thread."""

    limit: asyncio.Timeout  # ends the stream when it expires
    outbox: asyncio.Queue[tuple[LearnerMessage, int]] = field(default_factory=asyncio.Queue)  # and the rows answered

    def send(self, message: LearnerMessage, rows: int = 0) -> None:
        self.outbox.put_nowait((message, rows))


async def receive(stream: Stream, kind: type[Message], seconds: float) -> Message | None:
    """Return the next message, which must be of this kind and come in time; None if the actor has left."""
    try:
        message = await asyncio.wait_for(stream.read(), seconds)
    except TimeoutError:
        raise TooLate(f"message: expected {word_for(kind)} within {seconds:.0f} s, saw nothing") from None
    if not message:
        return None
    if not isinstance(message, kind):
        raise InvalidMessage(f"message: expected {word_for(kind)}, saw {kind_of(message)}")
    return message


async def send_outbox(connection: Connection, session: Session, stream: Stream) -> None:
    while True:
        message, rows = await connection.outbox.get()
        session.traffic.unsent -= rows
        await stream.write(message)  # waits for an actor that does not read


def kind_of(message: ActorMessage) -> str:
    return word_for(type(message))


def word_for(kind: type) -> str:
    return "step" if kind is StepParts else kind.__name__.lower()
