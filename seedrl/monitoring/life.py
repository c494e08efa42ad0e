"""The parts of a learner that monitoring reads, and its phase. Knows nothing of how they are shown."""

import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from seedrl.algorithms.signs import Signs
from seedrl.config import LearnerConfig
from seedrl.metrics import LearningMetrics, ServingMetrics
from seedrl.run.directory import RunDirectory
from seedrl.run.identity import ALONE, Identity
from seedrl.selection.base import Limits
from seedrl.serving.batcher import Batcher
from seedrl.serving.sessions import Request, SessionTable

WEDGED_SECONDS = 60.0  # without a batch, although rows wait for one


class Watched(NamedTuple):
    """The parts that exist from the start. They are counted by other threads, and any thread may read them."""

    config: LearnerConfig
    device: str
    run_directory: RunDirectory
    serving: ServingMetrics
    learning: LearningMetrics
    sessions: SessionTable
    batcher: Batcher[Request]
    identity: Identity = ALONE


class StoreLevel(Protocol):
    """The unrolls that a store holds, as any thread may read them."""

    @property
    def ready(self) -> int: ...

    @property
    def capacity(self) -> int: ...

    def limits(self) -> Limits: ...


class Versioned(Protocol):
    """The policy that acts."""

    @property
    def version(self) -> int: ...


class Beating(Protocol):
    """The loop that runs batches."""

    @property
    def alive_at(self) -> float: ...


class Running(NamedTuple):
    """The parts that exist once the spaces are known."""

    store: StoreLevel
    store_bytes: int
    policy: Versioned
    batches: Beating
    algorithm: str = ""  # in a few words
    is_on_policy: bool = False  # actors wait for every update
    signs: Signs = Signs()  # what the algorithm knows about its own troubles


@dataclass
class Life:
    """The phase of a learner. Each field is written once, by one thread, and read by any."""

    listen: str = ""  # where actors find the learner
    pages: str = ""  # where people find its pages; empty for nowhere
    running: Running | None = None  # once it serves and trains
    is_ready: bool = False  # once it is warmed up
    is_draining: bool = False  # once it was asked to stop

    @property
    def state(self) -> str:
        return "draining" if self.is_draining else "running" if self.is_ready else "waiting"

    @property
    def policy_version(self) -> int:
        return self.running.policy.version if self.running else 0

    @property
    def silent_seconds(self) -> float:
        """Return for how long rows have waited while no batch ran. Batches end before the last checkpoint."""
        is_expected = self.running is not None and not self.is_draining
        return time.monotonic() - self.running.batches.alive_at if self.running and is_expected else 0.0

    @property
    def is_alive(self) -> bool:
        return self.silent_seconds <= WEDGED_SECONDS
