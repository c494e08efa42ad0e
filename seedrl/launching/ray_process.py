"""One process of a job over all its restarts on Ray, as the driver sees it. Knows nothing of the other processes."""

import math
import signal
import time

from seedrl.launching.children import LAST_WORDS
from seedrl.launching.placement import LEARNER, PlacedProcess
from seedrl.launching.ray_host_handle import HostHandle


class RayProcess:
    """A process that waits for its host, may be started on it, runs on it, or is over. Owned by the driver."""

    def __init__(self, place: PlacedProcess, host: HostHandle) -> None:
        self.name, self.number = place.name, place.number
        self.is_learner = place.role == LEARNER
        self.host = host
        self.learner = ""  # the address that an actor streams to
        self.is_running = False
        self.is_moving = False  # it is an actor that changes its learner
        self.is_over = False  # it will not be started again
        self.leaves_by = math.inf  # when an actor that is not needed any more has to be gone
        self.due = 0.0  # it may not be started before
        self.exit_code: int | None = None  # the previous one; negative: ended by a signal
        self.last_words = ""

    @property
    def can_start(self) -> bool:
        is_idle = self.host.is_ready and not self.is_running and not self.is_over
        return is_idle and time.monotonic() >= self.due

    def request_host(self) -> None:
        """Await a host for a process that has none, or has lost it."""
        self.is_running = self.is_moving = False
        self.host.request()

    def restart(self) -> None:
        """Kill the host with the process, so that Ray restarts it."""
        self.is_running = self.is_moving = False
        self.host.restart()

    def start(self, module: str, arguments: list[str], more: dict[str, str]) -> None:
        """Start a module on the host with further variables."""
        self.host.run(module, arguments, more)
        self.is_running, self.last_words = True, ""

    def note_line(self, line: str) -> None:
        """Note what the process has printed: why it ends, or else its newest line."""
        if line.startswith(LAST_WORDS) or not self.last_words.startswith(LAST_WORDS):  # a traceback may follow
            self.last_words = line

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask the process to end cleanly by this signal, if it runs."""
        if self.is_running:
            self.host.stop(number)
