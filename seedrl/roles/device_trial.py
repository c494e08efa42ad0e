"""Tries a device before anything is trained on it: does it compute what the CPU does, and without making the host wait?

It trains a small network on made-up unrolls on both. Knows nothing of environments or runs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seedrl.actions import Actions
from seedrl.algorithms.build import build_algorithm
from seedrl.algorithms.neutral import resolve
from seedrl.columns import Record
from seedrl.config import LearnerConfig, ModelConfig, Precision
from seedrl.device import Download, Staging, learning_stream
from seedrl.learning.learner import Learner
from seedrl.metrics import LearningMetrics
from seedrl.models.base import core_size_of
from seedrl.models.build import build_run_model
from seedrl.selection.fifo import Fifo
from seedrl.specs import ArraySpec, EnvSpec, discrete
from seedrl.store import Store, StoreSizes
from seedrl.types import ModelOutput

SPEC = EnvSpec(ArraySpec((1, 36, 36), "uint8"), discrete(4))
UNROLLS, LENGTH, UPDATES = 4, 8, 3
TOLERANCE = 1e-2  # of weights that differ: optimisers enlarge what is rounded
CPU = torch.device("cpu")


class Trial(NamedTuple):
    is_passed: bool
    words: str


def trials(device: torch.device) -> Iterator[Trial]:
    """Yield what was tried, one after the other."""
    yield _copies(device)
    yield _parity(device, _network(), "a convolutional network")
    yield _parity(device, _network(lstm=16), "one with an LSTM")
    yield _waits(device)


def _network(lstm: int = 0) -> ModelConfig:
    return ModelConfig(name="nature", lstm=lstm, precision=Precision.fp32)


def _copies(device: torch.device) -> Trial:
    """Send arrays there and back."""
    arrays: list[NDArray[Any]] = [np.arange(1000), np.linspace(0, 1, 7, dtype=np.float32), np.array([True, False])]
    there, download = Staging(device).upload(*arrays), Download(device)
    is_same = True
    for tensor, array in zip(there, arrays, strict=True):
        download.begin(tensor)
        is_same &= bool(np.array_equal(download.wait(), array))
    return Trial(is_same, "arrays return as they were sent" if is_same else "arrays return changed")


def _parity(device: torch.device, model: ModelConfig, what: str) -> Trial:
    """Train on both; the largest difference counts, as a share of the largest weight."""
    got, expected = _Training(device, model).run(), _Training(CPU, model).run()
    difference = max(_distance(got[name], expected[name]) for name in expected)
    words = f"{what} trained on it differs from the CPU's by {difference:.1e} after {UPDATES} updates"
    return Trial(difference < TOLERANCE, words)


def _distance(got: Tensor, expected: Tensor) -> float:
    scale = expected.double().abs().max().clamp(min=TOLERANCE)
    return float(((got.double() - expected.double()).abs().max() / scale).nan_to_num(nan=torch.inf))


def _waits(device: torch.device) -> Trial:
    """Let torch refuse whatever makes the host wait for the device, where it can."""
    training = _Training(device, _network())
    training.run()
    try:
        with _refusing_waits(device):
            training.step()
    except RuntimeError as error:
        return Trial(False, f"an update makes the host wait: {str(error).splitlines()[0]}")
    return Trial(True, "updates do not make the host wait")


@contextmanager
def _refusing_waits(device: torch.device) -> Iterator[None]:
    module = torch.get_device_module(device)
    refuse = getattr(module, "set_sync_debug_mode", lambda mode: None)
    refuse("error")
    try:
        yield
    finally:
        refuse("default")


class _Training:
    """A learner with unrolls, the same on every device."""

    def __init__(self, device: torch.device, model: ModelConfig) -> None:
        self._device = device
        config = LearnerConfig(model=model)
        config.algorithm.batch_size, config.algorithm.unroll_length = UNROLLS, LENGTH
        config.algorithm.passes = config.algorithm.minibatches = 1
        config = resolve(config, SPEC)
        with learning_stream(device):
            self._model = build_run_model(config, SPEC, device)
            algorithm = build_algorithm(config.algorithm, Actions(SPEC), self._model)
            sizes = StoreSizes(1, UNROLLS, LENGTH, 1, core_size_of(self._model), algorithm.overlap)
            self._store = Store(SPEC, Fifo(), sizes, device)
            self._learner = Learner(
                config, self._model, algorithm, LearningMetrics(), env_steps=lambda: 0, prefer=self._store.prefer
            )
            self._fill()
            unrolls = self._store.take(UNROLLS, timeout=0.0)
            assert unrolls is not None
            self._unrolls = unrolls

    def _fill(self) -> None:
        columns, entry, random = self._store.columns, self._store.reserve(UNROLLS), np.random.default_rng(0)
        nothing = np.zeros(UNROLLS, np.int64)
        for t in range(LENGTH + 1):
            at = columns.locate(entry, nothing + t, nothing)
            columns.write_frames(at.frame, random.integers(0, 255, (UNROLLS, 1, 36, 36), np.uint8))
            reward, action = random.standard_normal(UNROLLS, np.float32), random.integers(0, 4, UNROLLS)
            flags = np.zeros(UNROLLS, np.uint8)
            columns.write_record(at, Record(reward, flags, nothing, action, action, np.array(0)))
            logits = torch.from_numpy(random.standard_normal((UNROLLS, 4), np.float32))
            columns.write_output(at, ModelOutput(logits.to(self._device), logits[:, 0].to(self._device)))
        self._store.commit(entry)

    def step(self) -> None:
        with learning_stream(self._device):
            self._learner.train(self._unrolls)

    def run(self) -> dict[str, Tensor]:
        """Return the weights after some updates."""
        for _ in range(UPDATES):
            self.step()
        return {name: tensor.detach().cpu() for name, tensor in self._model.state_dict().items()}
