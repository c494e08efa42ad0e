"""The messages between actors, learner and people, as plain records. Knows nothing of protobuf, gRPC or sessions.

Each record has the name and the fields of the message in proto/seedrl/v1/inference.proto, which explains them.
`wire.codec` turns records into bytes and back.
"""

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple

from seedrl.plugins import modules_of
from seedrl.specs import EnvSpec

PROTOCOL_VERSION = 3
MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # of any message; the spaces bound a Step further
MIN_MESSAGE_BYTES = 1024 * 1024  # that a learner reads whatever the spaces are, and before it knows them
PING_PATIENCE = 10.0  # seconds for an actor to answer a ping of the learner
MAX_REDIRECTS = 3  # in a row: an actor that has followed this many is served or refused


# From the actor.


class Hello(NamedTuple):
    """The first message of an actor: its name and its process."""

    name: str
    host: str = ""
    instance: str = ""
    epoch: int = 0
    env_failure: str = ""
    redirects: int = 0


class Ready(NamedTuple):
    """The pool is built, and these are its spaces."""

    spec: EnvSpec


class StepParts(NamedTuple):
    """A Step as its blobs: arrays when written, views of the received bytes when read."""

    request_id: int
    env_id: Any
    observation: Sequence[Any]  # one blob per leaf
    reward: Any
    flags: Any
    buffer: int = 0


class Report(NamedTuple):
    """The measurements of an actor since its session began."""

    steps: int = 0
    env_seconds: float = 0.0
    wait_seconds: float = 0.0
    requests: int = 0
    round_trip_seconds: float = 0.0
    cpu_seconds: float = 0.0
    reconnects: int = 0

    def since(self, before: "Report") -> "Report":
        """Return the difference from an earlier report."""
        return Report._make(now - then for now, then in zip(self, before, strict=True))


ActorMessage = Hello | Ready | StepParts | Report


# From the learner.


class Welcome(NamedTuple):
    """The session and the environments that an actor is to run."""

    session_id: int
    env_id: str
    options: dict[str, Any]
    num_envs: int
    group_size: int
    seed: int
    processes: bool = False
    wrappers: Sequence[str] = ()
    players: int = 1  # of one simulation; num_envs and group_size count players

    @property
    def modules(self) -> list[str]:
        """The Python modules that the actor has to import."""
        return modules_of(self.env_id, self.wrappers)


class Memory(NamedTuple):
    """The shared memory that a learner offers to an actor on the same machine."""

    path: str
    token: bytes  # the first bytes of the memory, which prove that it is the right one
    buffers: int
    buffer_bytes: int


class Act(NamedTuple):
    """The actions for the rows of some Steps."""

    request_id: Sequence[int]
    action: Sequence[bytes]  # one blob per leaf


class Command(IntEnum):
    """The commands of a Control message, with the numbers of the protocol."""

    UNSPECIFIED = 0
    DRAIN = 1
    END = 2
    RESET = 3
    PAUSE = 4
    RESUME = 5
    REDIRECT = 6


class Control(NamedTuple):
    """A command to an actor. `address` belongs to REDIRECT."""

    command: Command
    reason: str
    address: str = ""


LearnerMessage = Welcome | Memory | Act | Control


# From people.


class ControlRequest(NamedTuple):
    """A change that `seedrl control` asks a learner to make, for one actor or for all."""

    actor: str = ""
    temperature: float | None = None
    epsilon: float | None = None
    command: Command = Command.UNSPECIFIED
    options: dict[str, Any] | None = None
    open: bool | None = None


class Outcome(StrEnum):
    """The fate of a request for one member."""

    done = "done"
    refused = "refused"
    gone = "gone"  # it is no longer connected, so nobody was asked


class MemberResult(NamedTuple):
    """The result of a request for one member of a run."""

    name: str
    outcome: Outcome = Outcome.done
    reason: str = ""  # empty if it is done
    rank: int = 0  # of the learner that serves it, or did so last; does not travel


# The words of `seedrl control`.
ORDERS = {
    "pause": Command.PAUSE,
    "resume": Command.RESUME,
    "reset": Command.RESET,
    "drain": Command.END,
    "move": Command.REDIRECT,
}
