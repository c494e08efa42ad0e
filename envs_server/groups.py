"""The pool of one session as its two threads share it: one sends actions, the other receives rows.

Knows nothing of streams. Groups of environments circulate: a group that has its actions is stepping until it is
received.
"""

import atexit
import threading

import numpy as np
from numpy.typing import NDArray

from envs_server.pool import Pool, abandon
from seedrl.errors import EnvFailed
from seedrl.rows import Rows
from seedrl.specs import Arrays
from seedrl.tracebacks import failed

PAUSE_SECONDS = 0.1  # between looks whether a pause is over
RETURN_SECONDS = 1.0  # for the environments to give back the thread that waits for them
LAST_SECONDS = 5.0  # for the same, once more, if the process ends: on a busy machine a step may take longer


class SteppingGroups:
    """Thread-safe. `built`, `send`, `pause`, `wake` and `leave` are for the main thread, the others for the sender."""

    def __init__(self, leaving: threading.Event) -> None:
        self.pool: Pool | None = None
        self._leaving = leaving  # set when the session ends
        self._is_built = threading.Event()
        self._is_paused = False
        self._stepping = threading.Semaphore(0)  # groups that step
        self._in_pool = threading.Lock()  # held while a thread waits inside the environments' own code

    def built(self, pool: Pool, groups: int) -> None:
        """Take the pool; all of its groups step."""
        self.pool = pool
        self._stepping.release(groups)
        self._is_built.set()

    def send(self, action: Arrays, env_id: NDArray[np.int32]) -> None:
        """Give a group its actions. Raises EnvFailed."""
        assert self.pool is not None
        try:
            self.pool.send(action, env_id)
        except Exception as error:
            raise failed(EnvFailed, "the environment raised", error) from error
        self._stepping.release()

    def pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused

    def wake(self) -> None:
        """Let the sender notice at once that the session is leaving."""
        self._stepping.release()

    def leave(self) -> None:
        """Wait until no thread is inside the pool: one that returns from C++ while Python ends aborts the process."""
        if self._in_pool.acquire(timeout=RETURN_SECONDS):
            self._in_pool.release()
        elif self.pool is not None:
            abandon(self.pool)
            atexit.register(self._in_pool.acquire, timeout=LAST_SECONDS)  # before daemon threads are cut off

    def wait_for_pool(self) -> Pool | None:
        """Return the pool once it is built; None if the session ends first."""
        while not self._leaving.is_set():
            if self._is_built.wait(timeout=0.1):
                return self.pool
        return None

    def wait_for_group(self) -> bool:
        """Wait until a group is stepping; return whether it is, which is false when the session ends instead."""
        while not self._leaving.is_set():
            if self._is_paused:
                self._leaving.wait(PAUSE_SECONDS)
            elif self._stepping.acquire(timeout=0.5):
                return True
        return False

    def recv(self) -> Rows | None:
        """Return the rows of a group that has stepped; None if the session ends."""
        assert self.pool is not None
        with self._in_pool:
            return None if self._leaving.is_set() else self.pool.recv()
