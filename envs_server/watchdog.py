"""The watchdog of one session: notices a learner, or an environment, that has stopped answering.

Knows nothing of streams: the session reports what happens to it, and it ends the session through `cancel`.
"""

import os
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from seedrl.errors import EnvFailed

MAKE_SECONDS = 120.0  # to make environments; the learner waits no longer
ABANDON_SECONDS = 5.0  # for environments to give back the main thread once their session is over
NOT_STEPPING = np.iinfo(np.int64).max


class Watchdog:
    """Runs in the thread `watchdog`. The session's two threads report progress, each by a single assignment.

    Time is counted in looks, so that a process that was stopped for a while blames no peer and no environment.
    """

    def __init__(
        self,
        step_deadline: float,
        welcome_seconds: float,
        *,
        has_requests: Callable[[], bool],
        cancel: Callable[[], None],
    ) -> None:
        """`has_requests` says whether any request waits for the learner; `welcome_seconds` is for the first answer."""
        self.failure: EnvFailed | None = None  # of the environments
        self.stuck = ""  # in words, if the learner does not answer
        self._step_deadline = step_deadline
        self._answer_seconds = welcome_seconds
        self._has_requests = has_requests
        self._cancel = cancel
        self._pause = min(1.0, step_deadline / 4)
        self._moved = time.monotonic()  # when something happened last
        self._looks = 0
        self._state = "joining"  # then building, then stepping or paused
        self._stepping_since = np.zeros(0, np.int64)  # [simulations]  a look, or NOT_STEPPING
        self._players = 1  # of one simulation
        self._ended = threading.Event()

    def start(self, leaving: threading.Event) -> None:
        """Watch until `leaving` is set, and then whether the session ends."""
        threading.Thread(target=self._watch, args=(leaving,), name="watchdog", daemon=True).start()

    # Reports of the session.

    def moved(self, now: float) -> None:
        """A message was sent or received."""
        self._moved = now

    def welcomed(self, num_envs: int, players: int = 1) -> None:
        """The learner has answered, and the environments are being made; those of one simulation step together."""
        self._answer_seconds = self._step_deadline
        self._players = players
        self._stepping_since = np.full(num_envs // players, NOT_STEPPING, np.int64)
        self._state = "building"

    def built(self) -> None:
        """The environments are made, and all of them step."""
        self._moved = time.monotonic()
        self._stepping_since[:] = self._looks
        self._state = "stepping"

    def sent(self, env_id: NDArray[np.int32]) -> None:
        """These environments have their actions."""
        self._stepping_since[env_id // self._players] = self._looks

    def received(self, env_id: NDArray[np.int32]) -> None:
        """These environments have stepped."""
        self._stepping_since[env_id // self._players] = NOT_STEPPING

    def paused(self, is_paused: bool) -> None:
        """The learner has asked for no further Step, or for Steps again. The time in between does not count."""
        self._state = "paused" if is_paused else "stepping"
        self._stepping_since[self._stepping_since != NOT_STEPPING] = self._looks

    def ended(self) -> None:
        """The session is over."""
        self._ended.set()

    # Everything below runs in the thread `watchdog`.

    def _watch(self, leaving: threading.Event) -> None:
        silent, moved = 0.0, self._moved
        while not leaving.wait(timeout=self._pause):
            self._looks += 1
            silent = silent + self._pause if self._moved == moved and self._state != "paused" else 0.0
            moved = self._moved
            self._look(silent)
            if self.failure or self.stuck:
                self._cancel()
        if not self._ended.wait(ABANDON_SECONDS) and self.failure:
            # The main thread is lost in the environments' own code. Only the end of the process brings it back.
            print(f"actor: {self.failure}; ending the process", file=sys.stderr, flush=True)
            os._exit(EnvFailed.exit_code)

    def _look(self, silent: float) -> None:
        """Judge a session in which nothing has happened for some seconds."""
        if self._state == "building":
            self.failure = _overdue("the environments could not be made", silent, MAKE_SECONDS)
        elif silent and (self._has_requests() or self._state == "joining"):
            if silent >= self._answer_seconds:
                self.stuck = f"the learner has not answered for {silent:.0f} s"
        elif self._state == "stepping":
            self.failure = self.failure or self._hanging()

    def _hanging(self) -> EnvFailed | None:
        """Name an environment that does not answer, even if others do."""
        env_id = int(self._stepping_since.argmin())
        seconds = max(0.0, (self._looks - int(self._stepping_since[env_id])) * self._pause)
        return _overdue(f"environment {env_id} has not answered", seconds, self._step_deadline)


def _overdue(what: str, seconds: float, limit: float) -> EnvFailed | None:
    return EnvFailed(f"{what} for {seconds:.0f} s") if seconds >= limit else None
