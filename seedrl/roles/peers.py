"""The learner processes that train one model together, as one of them sees the others.

`Alone` is the usual case, in which there are no others; `seedrl/ranks/peers.py` has the other one.
"""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from seedrl.algorithms.base import Algorithm
from seedrl.config import LearnerConfig
from seedrl.learning.learner import Learner, Publisher
from seedrl.learning.loop import AloneRounds, Rounds, Trains
from seedrl.metrics import LearningMetrics, ServingMetrics
from seedrl.run.checkpoint import Checkpoint, Tensors
from seedrl.run.directory import RunDirectory
from seedrl.run.identity import Identity
from seedrl.run.saving import Saver
from seedrl.run.stopping import Progress, Stop
from seedrl.run.totals import Counts
from seedrl.serving.service import InferenceService
from seedrl.specs import EnvSpec
from seedrl.types import Ticket


class Trainable(Trains, Protocol):
    """A learner, here or elsewhere, with everything a checkpoint needs."""

    model: nn.Module

    def publish(self, policy: Publisher) -> None: ...

    def tensors(self) -> Tensors: ...

    def load(self, tensors: Tensors) -> None: ...

    def sync(self) -> None: ...


class Peers(Protocol):
    """Every method is called by all processes, in the same order. Owned by the main and the learner thread in turn."""

    identity: Identity

    def open_run(self, config: LearnerConfig) -> tuple[RunDirectory, LearnerConfig]:
        """Claim the run directory; return it and the settings with its path."""
        ...

    def share_checkpoint(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        """Return what the first process has loaded."""
        ...

    def rounds(self, stop: Stop, service: InferenceService, serving: ServingMetrics, saver: Saver) -> Rounds: ...

    def announce(self, address: str) -> None:
        """Exchange the addresses by which actors reach the endpoints."""
        ...

    def agreed_spec(self, service: InferenceService) -> EnvSpec | None:
        """Return the spaces, once an actor of any process has announced them in Ready; call it after a round.

        Return None as well if a process refuses them: then a stop is requested of all.
        """
        ...

    def generator_seed(self, seed: int, earlier_processes: int) -> int:
        """Return what seeds the sampling of actions."""
        ...

    def learner(
        self,
        config: LearnerConfig,
        model: nn.Module,
        algorithm: Algorithm,
        metrics: LearningMetrics,
        *,
        env_steps: Callable[[], int],
        prefer: Callable[[Ticket, Tensor], None],
    ) -> Trainable: ...

    def same_weights(self, model: nn.Module) -> None:
        """Make the initial weights those of the first process."""
        ...

    def total(self, counts: Counts) -> Counts:
        """Return what all processes together have counted."""
        ...

    def shown_progress(self) -> Progress | None:
        """Return the progress of all processes, if this one has to show it instead of its own."""
        ...

    def leave(self) -> None: ...


class Alone:
    """One learner process."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity

    def open_run(self, config: LearnerConfig) -> tuple[RunDirectory, LearnerConfig]:
        directory = RunDirectory.prepare(config)
        directory.claim(config)
        return directory, config

    def share_checkpoint(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        return checkpoint

    def rounds(self, stop: Stop, service: InferenceService, serving: ServingMetrics, saver: Saver) -> Rounds:
        goal = service.config.stop
        return AloneRounds(stop, goal, progress=lambda: Progress.of(serving), is_save_due=lambda: saver.is_due)

    def announce(self, address: str) -> None:
        pass

    def agreed_spec(self, service: InferenceService) -> EnvSpec | None:
        spec = service.sessions.spec
        return spec.result() if spec.done() else None

    def generator_seed(self, seed: int, earlier_processes: int) -> int:
        return seed

    def learner(
        self,
        config: LearnerConfig,
        model: nn.Module,
        algorithm: Algorithm,
        metrics: LearningMetrics,
        *,
        env_steps: Callable[[], int],
        prefer: Callable[[Ticket, Tensor], None],
    ) -> Learner:
        return Learner(config, model, algorithm, metrics, env_steps=env_steps, prefer=prefer)

    def same_weights(self, model: nn.Module) -> None:
        pass

    def total(self, counts: Counts) -> Counts:
        return counts

    def shown_progress(self) -> Progress | None:
        return None

    def leave(self) -> None:
        pass
