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
from seedrl.config import LearnerConfig
from seedrl.metrics import ServingMetrics
from seedrl.models.base import ActorCritic
from seedrl.models.mlp import TinyEncoder
from seedrl.policy import Policy
from seedrl.rows import RESET
from seedrl.serving.balance import Balance
from seedrl.serving.batch_loop import BatchLoop
from seedrl.serving.batcher import Batcher
from seedrl.serving.inference import Inference
from seedrl.serving.protocol import SessionProtocol
from seedrl.serving.server import Server
from seedrl.serving.sessions import Request, SessionTable
from seedrl.serving.slots import Slots
from seedrl.specs import EnvSpec
from seedrl.status import Status
from seedrl.store import Store
from seedrl.types import ModelInput, ModelOutput
from seedrl.wire.messages import Command

CPU = torch.device("cpu")


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


class ServingRig:
    """Serves at `address` until closed. `metrics` counts what it served."""

    def __init__(self, config: LearnerConfig, make_model: Callable[[EnvSpec], nn.Module]) -> None:
        self.config = config
        self.metrics = ServingMetrics()
        self._make_model = make_model
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        serving = config.serving
        self._batcher: Batcher[Request] = Batcher(serving.max_rows, serving.min_rows, serving.max_wait)
        self._sessions = SessionTable(config, job_seed=lambda session_id: session_id)
        balance = Balance(self._sessions)
        self._protocol = SessionProtocol(
            config, self._sessions, balance, self._batcher, self.metrics, say=lambda text: None
        )
        self._server = Server(
            config,
            self._protocol,
            balance,
            self.metrics,
            on_failure=self._fail,
            say=lambda text: None,
            describe=lambda: Status("running", "", config.env.id, "cpu", "", "", "", 0),
        )
        self._builder = threading.Thread(target=self._guard, args=(self._build_and_drain,), name="drain")

    def __enter__(self) -> "ServingRig":
        self._server.start()
        self._builder.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._builder.join()
        self._server.stop(Command.END, "measured")
        if self._failure is not None:
            raise self._failure

    def _guard(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._stopping.set()

    @property
    def served(self) -> int:
        """Actors that have sent a request."""
        return sum(not (session.lease.expects == RESET).all() for session in self._sessions.open.values())

    def _build_and_drain(self) -> None:
        while not self._sessions.spec.done():
            if self._stopping.wait(0.01):
                return
        torch.set_num_threads(1)
        store, batches = self._build(self._sessions.spec.result())
        serving = self._server.run(batches.run())
        while not self._stopping.wait(0.005):
            store.discard()  # what a learner would train on is freed unread
        batches.stop()
        serving.result(timeout=10)

    def _build(self, spec: EnvSpec) -> tuple[Store, BatchLoop]:
        config = self.config
        store = Store(
            spec,
            slots=config.serving.max_slots,
            capacity=config.store.capacity or 4 * config.serving.max_rows,
            unroll_length=config.algorithm.unroll_length,
            frame_stack=config.env.frame_stack,
            core_size=0,
            device=CPU,
        )
        stacked = spec.stacked(config.env.frame_stack)
        actions = Actions(spec)
        inference = Inference(
            Policy(self._make_model(stacked), version=0),
            actions,
            Slots(config.serving.max_slots, actions, config.env.frame_stack, 0, CPU),
            store,
            self.metrics,
            generator=torch.Generator().manual_seed(1),
            device=CPU,
            answer=self._protocol.answer,
        )
        batches = BatchLoop(self._batcher, inference, self.metrics)
        store.on_free = batches.wake
        return store, batches


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
