"""The serving half of a learner, for real, and a model that costs nothing. Training is replaced by freeing unrolls.

So recording is paid for and learning is not.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from seedrl.config import LearnerConfig
from seedrl.metrics import ServingMetrics
from seedrl.policy import Policy
from seedrl.serving.batcher import Batcher
from seedrl.serving.inference import Inference
from seedrl.serving.server import Server
from seedrl.serving.sessions import Request, SessionTable
from seedrl.serving.slots import Slots
from seedrl.specs import EnvSpec
from seedrl.store import Store
from seedrl.types import ModelInput, ModelOutput
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire.codec import RESET

CPU = torch.device("cpu")


class NullModel(nn.Module):
    """Every action alike, after `seconds` without the GIL, as an accelerator would take them."""

    core_size = 0

    def __init__(self, num_actions: int, seconds: float = 0.0) -> None:
        super().__init__()
        self._num_actions = num_actions
        self._seconds = seconds

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        if self._seconds:
            time.sleep(self._seconds)
        rows = inputs.reward.shape
        return ModelOutput(torch.zeros(*rows, self._num_actions), torch.zeros(rows)), core_state


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
        self._server = Server(
            config, self._sessions, self._batcher, self.metrics, on_failure=self._fail, say=lambda text: None
        )
        self._threads = [threading.Thread(target=self._guard, args=(loop,)) for loop in (self._infer, self._drain)]

    def __enter__(self) -> "ServingRig":
        self._server.start()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._server.stop(pb.Control.COMMAND_END, "measured")
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
        return sum(not (session.expects == RESET).all() for session in self._sessions.open.values())

    @property
    def _store(self) -> Store | None:
        return self.__dict__.get("store")

    def _infer(self) -> None:
        torch.set_num_threads(1)
        while not self._sessions.spec.done():
            if self._stopping.wait(0.01):
                return
        spec, config = self._sessions.spec.result(), self.config
        self.store = Store(
            spec,
            slots=config.serving.max_slots,
            capacity=config.store.capacity or 4 * config.serving.max_rows,
            unroll_length=config.algorithm.unroll_length,
            frame_stack=config.env.frame_stack,
            core_size=0,
            device=CPU,
        )
        stacked = EnvSpec(spec.observation.stacked(config.env.frame_stack), spec.num_actions)
        inference = Inference(
            Policy(self._make_model(stacked), version=0),
            Slots(config.serving.max_slots, config.env.frame_stack, 0, CPU),
            self.store,
            self.metrics,
            generator=torch.Generator().manual_seed(1),
            device=CPU,
            answer=self._server.answer,
            stopping=self._stopping.is_set,
        )
        while not self._stopping.is_set():
            if requests := self._batcher.take(0.1):
                inference.run(requests)

    def _drain(self) -> None:
        """What a learner would train on is freed at once."""
        while not self._stopping.wait(0.002):
            if self._store is not None:
                self._store.discard()


@contextmanager
def private_address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        yield f"unix:{Path(directory) / 'socket'}"
