"""The serving half of a learner, for real, and a model that costs nothing. Training is replaced by freeing unrolls.

So recording is paid for and learning is not.
"""

import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.config import LearnerConfig, ModelConfig
from seedrl.errors import ThreadDied
from seedrl.metrics import ServingMetrics
from seedrl.models.base import ActorCritic
from seedrl.models.mlp import TinyEncoder
from seedrl.policy import Policy
from seedrl.rows import RESET
from seedrl.selection.base import Entries
from seedrl.selection.fifo import Fifo
from seedrl.serving.seats import planned_seats
from seedrl.serving.service import InferenceService
from seedrl.specs import EnvSpec
from seedrl.status import Status
from seedrl.store import Store, StoreSizes
from seedrl.types import ModelInput, ModelOutput
from seedrl.wire.messages import Command


def vtrace_config() -> LearnerConfig:
    """Return the settings that everything but whole runs is measured with: V-trace, one gradient step per batch."""
    algorithm = AlgorithmConfig(
        name="vtrace", unroll_length=20, batch_size=16, passes=1, minibatches=1, on_policy=False, entropy_cost=0.01
    )
    return LearnerConfig(algorithm=algorithm, model=ModelConfig(popart=False))


CPU = torch.device("cpu")
STOP_SECONDS = 10.0


class NullModel(nn.Module):
    """Every action alike, after `seconds` without the GIL, as an accelerator would take them."""

    core_size = 0

    def __init__(self, num_actions: int, seconds: float = 0.0) -> None:
        super().__init__()
        self._logits = torch.zeros(1, 1, num_actions)
        self._value = torch.zeros(1, 1)
        self._seconds = seconds

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        if self._seconds:
            time.sleep(self._seconds)
        rows = inputs.reward.shape
        return ModelOutput(self._logits.expand(*rows, -1), self._value.expand(rows)), core_state


class PacedModel(ActorCritic):
    """A tiny network that sleeps so many seconds in every forward, or in every one that is for an update.

    For whole runs: model.name=bench.rig:PacedModel.
    """

    def __init__(self, spec: EnvSpec, acting: float = 0.0, training: float = 0.0) -> None:
        assert not isinstance(spec.observation, dict)
        encoder = TinyEncoder(spec.observation)
        super().__init__(encoder, encoder.size, spec)
        self._acting, self._training = acting, training

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        if seconds := self._training if torch.is_grad_enabled() else self._acting:
            time.sleep(seconds)
        return super().forward(inputs, core_state)


class Overwritten(Fifo):
    """A queue that nobody reads: the oldest unrolls make room for new ones."""

    def evict(self, count: int) -> Entries:
        return self.pick(min(count, len(self))).entries


class ServingRig:
    """Serves at `address` until closed; `metrics` counts what it served. Owned by the main thread."""

    def __init__(self, config: LearnerConfig, make_model: Callable[[EnvSpec], nn.Module]) -> None:
        self.config = config
        self.metrics = ServingMetrics()
        self._make_model = make_model
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._service = InferenceService(
            config,
            self.metrics,
            plan=planned_seats(config),
            job_seed=lambda session_id: session_id,
            on_failure=self._fail,
            say=lambda text: None,
            describe=lambda: Status("running", "", config.env.id, "cpu", "", "", "", 0),
        )
        self._builder = threading.Thread(target=self._build_and_serve, name="builder")

    def __enter__(self) -> "ServingRig":
        self._service.server.start()
        self._builder.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._builder.join()
        self._service.server.stop(Command.END, "measured")
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._stopping.set()

    @property
    def served(self) -> int:
        """Return the number of actors that have sent a request."""
        return sum(not (session.lease.expects == RESET).all() for session in self._service.sessions.open.values())

    def _build_and_serve(self) -> None:
        """Runs in a thread of its own, because the spaces are known only once an actor has joined."""
        try:
            while not self._service.sessions.spec.done():
                if self._stopping.wait(0.01):
                    return
            self._build(self._service.sessions.spec.result())
            self._service.begin(on_ready=lambda: None)
            self._stopping.wait()
            self._service.pause()
            if not self._service.wait(STOP_SECONDS):
                raise ThreadDied(f"the last batch was not over within {STOP_SECONDS:g} s")
        except BaseException as error:
            self._fail(error)

    def _build(self, spec: EnvSpec) -> None:
        torch.set_num_threads(1)
        config = self.config
        sizes = StoreSizes.of(config, core_size=0)
        sizes = sizes._replace(capacity=config.store.capacity or 4 * config.serving.max_rows)
        self._service.build(
            Policy(self._make_model(spec.stacked(config.env.frame_stack)), version=0),
            Actions(spec),
            Store(spec, Overwritten(), sizes, CPU),
            core_size=0,
            generator=torch.Generator().manual_seed(1),
            device=CPU,
        )


@contextmanager
def private_address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        yield f"unix:{Path(directory) / 'socket'}"


@contextmanager
def any_port() -> Iterator[str]:
    """A free port of the loopback, for what has to cross TCP."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    yield f"127.0.0.1:{port}"
