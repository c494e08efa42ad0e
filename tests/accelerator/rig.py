"""Serving and learning together, on any device and in one thread, driven by hand."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seedrl.actions import Actions
from seedrl.algorithms.build import build_algorithm
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.config import LearnerConfig, ModelConfig, StopConfig
from seedrl.device import is_accelerator
from seedrl.learning.learner import Learner
from seedrl.metrics import LearningMetrics
from seedrl.models.build import build_model
from seedrl.rows import RESET, TERMINATED, Rows
from seedrl.selection.base import Selector
from seedrl.serving.seats import Seat
from seedrl.serving.sessions import Request, Session
from seedrl.specs import ArraySpec, EnvSpec, leaves
from tests.builders import one_step
from tests.rig import Rig

BATCH = 4  # unrolls in a train batch
LENGTH = 4  # steps in an unroll


class Played(NamedTuple):
    """The part of a run that must not depend on the device."""

    actions: list[NDArray[Any]]
    weights: dict[str, Tensor]
    metrics: LearningMetrics


class Loop(Rig):
    """A rig with a learner. Environments are random numbers with episodes of five steps."""

    def __init__(
        self,
        spec: EnvSpec,
        config: ModelConfig,
        device: torch.device,
        algorithm: AlgorithmConfig | None = None,
        *,
        slots: int = 4,
        frame_stack: int = 1,
        unroll_length: int = LENGTH,
        capacity: int = 64,
        selector: Selector | None = None,
        memory: torch.device | None = None,
        sizes: Sequence[int] | None = None,
        graphs: bool = False,
    ) -> None:
        """Batches of all slots have a row of padding on an accelerator, unless other `sizes` are given."""
        model = build_model(config, spec.stacked(frame_stack), seed=1).to(device)
        is_padded = is_accelerator(device) and memory in (None, device)
        algorithm = algorithm or one_step()
        algorithm.batch_size, algorithm.unroll_length = BATCH, unroll_length
        built = build_algorithm(algorithm, Actions(spec, config.squash), model)
        super().__init__(
            spec,
            model,
            slots=slots,
            frame_stack=frame_stack,
            unroll_length=unroll_length,
            capacity=capacity,
            overlap=built.overlap,
            selector=selector,
            device=device,
            memory=memory,
            sizes=sizes if sizes is not None else (slots + 1,) if is_padded else (),
            graphs=graphs,
        )
        self.learning = LearningMetrics()
        self.learner = Learner(
            LearnerConfig(algorithm=algorithm, stop=StopConfig(env_steps=10**6)),
            self.model,
            built,
            self.learning,
            env_steps=lambda: 0,
            prefer=self.store.prefer,
        )
        self._spec = spec
        self._random = np.random.default_rng(0)
        self._row = np.zeros(slots, np.int64)

    def join_all(self, requests: int = 1, seats: Sequence[Seat] | None = None) -> list[Session]:
        """Return this many sessions, which share the slots evenly."""
        groups = np.arange(len(self._row)).reshape(requests, -1)
        return [self.join(group.tolist(), seats) for group in groups]

    def requests(self, sessions: Sequence[Session]) -> list[Request]:
        """Return the next request of each session."""
        return [self.request(session, self._rows(session)) for session in sessions]

    def _rows(self, session: Session) -> Rows:
        slots = session.lease.slots
        step = self._row[slots] % 6
        self._row[slots] += 1
        flags = np.where(step == 0, RESET, np.where(step == 5, TERMINATED, 0)).astype(np.uint8)
        reward = np.where(step > 0, self._random.normal(size=len(slots)), 0).astype(np.float32)
        observation = self._spec.observation
        if isinstance(observation, dict):
            values: Any = {name: self._values(leaf, len(slots)) for name, leaf in observation.items()}
        else:
            values = self._values(observation, len(slots))
        return Rows(np.arange(len(slots), dtype=np.int32), values, reward, flags)

    def _values(self, leaf: ArraySpec, rows: int) -> NDArray[Any]:
        if leaf.dtype.startswith("float"):
            return self._random.normal(size=(rows, *leaf.shape)).astype(leaf.dtype)
        return self._random.integers(0, 2, (rows, *leaf.shape)).astype(leaf.dtype)

    def step(self, sessions: Sequence[Session]) -> list[NDArray[Any]]:
        """Run one batch; return its actions, leaf by leaf."""
        answers = self.run(*self.requests(sessions))
        return [leaf for answer in answers for leaf in leaves(answer)]

    def update(self) -> bool:
        """Train on the next train batch, if there is one, and publish."""
        unrolls = self.store.take(BATCH, timeout=0)
        if unrolls is None:
            return False
        self.learner.train(unrolls)
        self.learner.publish(self.policy)
        return True

    def play(  # type: ignore[override]
        self, steps: int, requests: int = 1, seats: Sequence[Seat] | None = None
    ) -> Played:
        """Step all environments, train whenever that is possible."""
        sessions, actions = self.join_all(requests, seats), []
        for _ in range(steps):
            actions += self.step(sessions)
            self.update()
        return Played(actions, {name: t.cpu() for name, t in self.model.state_dict().items()}, self.learning)
