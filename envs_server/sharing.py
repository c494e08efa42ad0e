"""Observations in the learner's shared memory instead of in messages. Knows nothing of streams or pools."""

import contextlib
from collections import deque

import numpy as np

from seedrl.rows import Rows
from seedrl.specs import EnvSpec, leaves
from seedrl.wire.layout import shared_bytes, shared_leaves
from seedrl.wire.memory import SharedBuffers, open_buffers
from seedrl.wire.messages import Memory


class MemoryWriter:
    """`put` belongs to the thread that sends, the other methods to the main thread."""

    def __init__(self) -> None:
        self._memory: SharedBuffers | None = None
        self._free: deque[int] = deque()  # buffers

    def open(self, offer: Memory) -> None:
        """Use the memory from now on; if it cannot be opened, observations stay in the messages."""
        with contextlib.suppress(OSError):
            memory = open_buffers(offer)
            self._free.extend(range(1, memory.count + 1))
            self._memory = memory

    def put(self, rows: Rows, spec: EnvSpec) -> int:
        """Write the observations; return the number of their buffer, which is 0 if there is none for them."""
        memory, n = self._memory, len(rows.env_id)
        if memory is None or not self._free:
            return 0
        size = shared_bytes(spec, n)
        if size > memory.buffer_bytes:
            return 0
        buffer = self._free.popleft()
        places = shared_leaves(memory.bytes(buffer, size), spec, n)
        for place, leaf in zip(places, leaves(rows.observation), strict=True):
            np.copyto(np.frombuffer(place, leaf.dtype).reshape(leaf.shape), leaf)
        return buffer

    def free(self, buffer: int) -> None:
        """Use a buffer again: its request was answered."""
        if buffer:
            self._free.append(buffer)
