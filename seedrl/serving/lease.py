"""The slots that a session holds, and the rules for the rows in them. Knows nothing of streams."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from seedrl.errors import InvalidMessage
from seedrl.rows import ENDED, KNOWN_FLAGS, RESET, Rows
from seedrl.wire.memory import OfferedBuffers

IN_FLIGHT = np.uint8(128)  # a row of the environment waits for its action
EXPECTED_AFTER = np.array([RESET if flags & ENDED else 0 for flags in KNOWN_FLAGS], np.uint8)  # a row with these


@dataclass(eq=False, slots=True)
class Lease:
    """The slots of a session, and the state of each environment in them. Owned by the server thread."""

    slots: NDArray[np.int64]  # [num_envs]  the slot of each environment
    expects: NDArray[np.uint8]  # [num_envs]  flags of its next row: RESET or 0; IN_FLIGHT: no row before its action
    players: int = 1  # of one simulation
    in_flight: int = 0  # rows that wait for their actions
    memory: OfferedBuffers | None = None  # shared with the actor
    busy_buffers: set[int] = field(default_factory=set)  # of that memory: a request in flight uses them
    requests: set[int] = field(default_factory=set)  # the ids of those in flight

    def admit(self, rows: Rows, buffer: int = 0) -> None:
        """Check the rules that no single message shows: one row in flight per environment, RESET where it belongs."""
        if buffer:
            self._use(buffer)
        expected = self.expects.take(rows.env_id)
        if (rows.flags & RESET).tobytes() != expected.tobytes():  # bytes: half the time of comparing arrays
            raise self._complaint(rows)
        if np.count_nonzero(expected) and rows.reward[expected == RESET].any():
            raise InvalidMessage("reward: expected 0 on RESET rows, saw another number")
        self.expects.put(rows.env_id, IN_FLIGHT)
        self.in_flight += len(rows.env_id)
        if self.expects.tobytes().count(IN_FLIGHT) != self.in_flight:
            raise InvalidMessage("env_id: expected each environment once, saw one twice")

    def begin(self, request_id: int) -> None:
        """Note a request in flight. Raises InvalidMessage if one with the same id is, so that an Act names only one."""
        if request_id in self.requests:
            raise InvalidMessage(f"request_id: expected one of no request in flight, saw {request_id} again")
        self.requests.add(request_id)

    def answered(self, rows: Rows, buffer: int = 0) -> None:
        self.busy_buffers.discard(buffer)
        self.expects[rows.env_id] = EXPECTED_AFTER[rows.flags]
        self.in_flight -= len(rows.env_id)

    @property
    def is_all_in_flight(self) -> bool:
        """Tell whether every simulation waits for an action; where players move in turn, others have no row then."""
        if self.players == 1:
            return self.in_flight == len(self.slots)
        return bool((self.expects.reshape(-1, self.players) == IN_FLIGHT).any(axis=1).all())

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()

    def _use(self, buffer: int) -> None:
        if buffer in self.busy_buffers:
            raise InvalidMessage(f"buffer: expected one with no request in flight, saw {buffer} again")
        self.busy_buffers.add(buffer)
        self.close()  # the actor has opened the memory, and keeps it

    def _complaint(self, rows: Rows) -> InvalidMessage:
        expected = self.expects[rows.env_id]
        busy = rows.env_id[expected == IN_FLIGHT]
        if len(busy):
            return InvalidMessage(f"env_id: expected environments with no row in flight, saw {busy[0]} again")
        row = int(np.argmax((rows.flags & RESET) != expected))
        wanted = "RESET" if expected[row] else "no RESET"
        return InvalidMessage(f"flags: expected {wanted} for environment {rows.env_id[row]}, saw {rows.flags[row]}")
