"""Tries a device before anything is trained on it: does it compute what the CPU does, and without making the host wait?

It trains a small network on made-up unrolls on both, and lets one serve made-up rows with graphs and without. Then it
measures the memory that serving and training the network of a run take. Knows nothing of environments.
"""

from collections.abc import Callable, Iterator, Sequence
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
from seedrl.config import LearnerConfig, ModelConfig, Precision, ServingConfig, StoreConfig, StoreDevice
from seedrl.device import Download, Staging, is_accelerator, learning_stream, serving_stream
from seedrl.errors import ConfigError
from seedrl.learning.learner import Learner
from seedrl.metrics import LearningMetrics, ServingMetrics
from seedrl.models.base import core_size_of
from seedrl.models.build import build_run_model
from seedrl.policy import Policy
from seedrl.rows import RESET, Rows
from seedrl.selection.fifo import Fifo
from seedrl.serving.buckets import sizes_of_run
from seedrl.serving.inference import Inference
from seedrl.serving.lease import Lease
from seedrl.serving.seats import Seats
from seedrl.serving.sessions import Request, Session
from seedrl.serving.slots import Slots
from seedrl.specs import ArraySpec, EnvSpec, discrete
from seedrl.store import Store, StoreSizes
from seedrl.types import ModelOutput
from seedrl.wire.messages import Hello

SPEC = EnvSpec(ArraySpec((1, 36, 36), "uint8"), discrete(4))
UNROLLS, LENGTH, UPDATES = 4, 8, 3
TOLERANCE = 1e-2  # of weights that differ: optimisers enlarge what is rounded
SAME = 1e-4  # of outputs that differ: libraries may choose other kernels while a graph is recorded
ROWS = 6  # in a batch that is padded to 8
CPU = torch.device("cpu")


class Trial(NamedTuple):
    is_passed: bool
    words: str


def described(device: torch.device) -> str:
    """Return the name of an accelerator, its memory, and the versions that decide what it does."""
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    versions = f"CUDA {torch.version.cuda}, HIP {torch.version.hip}, cuDNN {torch.backends.cudnn.version()}"
    return f"{module.get_device_name(device)}, {free / 2**20:,.0f} of {total / 2**20:,.0f} MiB free; {versions}"


def trials(device: torch.device) -> Iterator[Trial]:
    """Yield what was tried, one after the other."""
    yield _copies(device)
    yield _parity(device, _network(), "a convolutional network")
    yield _parity(device, _network(lstm=16), "one with an LSTM")
    yield _waits(device)
    if is_accelerator(device):
        yield _graphs(device, _network(), "a convolutional network")
        yield _graphs(device, _network(lstm=16), "one with an LSTM")


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


def _graphs(device: torch.device, model: ModelConfig, what: str) -> Trial:
    """Serve the same rows with graphs and kernel by kernel; the largest difference of what is recorded counts."""
    config = LearnerConfig(model=model, serving=ServingConfig(max_slots=ROWS), store=StoreConfig(capacity=ROWS))
    config.algorithm.unroll_length = LENGTH
    try:
        got, expected = (_Serving(device, config, SPEC, (ROWS + 2,), graphs).run() for graphs in (True, False))
    except (ConfigError, RuntimeError) as error:  # the model is not fit for them, or the device is not
        return Trial(False, f"{what} cannot be served with graphs: {error}")
    difference = max(_distance(got[name], tensor) for name, tensor in expected.items() if tensor.numel())
    return Trial(difference < SAME, f"{what} served with graphs differs by {difference:.1e} from launched kernels")


class _Serving:
    """A network that serves, ready for rows of the given sizes."""

    def __init__(
        self, device: torch.device, config: LearnerConfig, spec: EnvSpec, sizes: Sequence[int], graphs: bool
    ) -> None:
        self._device = device
        actions, count = Actions(spec, config.model.squash), config.serving.max_slots
        with learning_stream(device):
            network = build_run_model(config, spec, device)
            core_size = core_size_of(network)
            self._store = Store(
                spec, Fifo(), StoreSizes.of(config, core_size), device, memory=_memory_of(config, device)
            )
            policy = Policy(network, version=0)
        with serving_stream(device):
            self._slots = Slots(count, actions, config.env.frame_stack, core_size, device)
            self._inference = Inference(
                policy,
                actions,
                self._slots,
                Seats(count),
                self._store,
                ServingMetrics(),
                generator=torch.Generator(device).manual_seed(1),
                device=device,
                answer=lambda answers: None,
                sizes=sizes,
                graphs=graphs,
            )
            self._inference.warm_up(min(count, config.serving.max_rows))

    def run(self) -> dict[str, Tensor]:
        """Serve made-up rows of SPEC, the same each time; return what is recorded in an unroll of each slot."""
        slots, random = np.arange(ROWS), np.random.default_rng(0)
        session = Session(id=1, hello=Hello("trial"), lease=Lease(slots, np.full(ROWS, RESET, np.uint8)))
        with serving_stream(self._device):
            for t in range(LENGTH + 1):
                frames = random.integers(0, 255, (ROWS, 1, 36, 36), np.uint8)
                reward = random.standard_normal(ROWS, np.float32) * np.float32(t > 0)
                rows = Rows(slots.astype(np.int32), frames, reward, np.full(ROWS, RESET * (t == 0), np.uint8))
                self._inference.run([Request(session, t, rows, slots)])
            return self._store.columns.read(self._slots.entry[:ROWS])


def _memory_of(config: LearnerConfig, device: torch.device) -> torch.device:
    """Return where the settings put the unrolls."""
    return CPU if config.store.device is StoreDevice.host else device


def memory_taken(config: LearnerConfig, spec: EnvSpec, device: torch.device) -> str:
    """Return in words what serving and one update of a run take on an accelerator, measured; both have its store."""
    config = resolve(config, spec)
    sizes = sizes_of_run(config) if _memory_of(config, device) == device else ()
    graphs = bool(sizes) and config.serving.graphs is not False
    serving = _peak(device, lambda: _Serving(device, config, spec, sizes, graphs))
    training = _peak(device, lambda: _update(device, config, spec))
    how = f"with graphs of {len(sizes)} sizes" if graphs else "without graphs"
    return f"serving takes {serving:,.1f} MiB {how}, training {training:,.1f} MiB at its peak, each with the store"


def _peak(device: torch.device, work: Callable[[], object]) -> float:
    """Return the largest number of MiB that was allocated meanwhile, besides what was before."""
    module = torch.get_device_module(device)
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    work()
    return float((module.max_memory_allocated(device) - before) / 2**20)


def _update(device: torch.device, config: LearnerConfig, spec: EnvSpec) -> None:
    """Make an update of a run, with unrolls that count for nothing."""
    with learning_stream(device):
        model = build_run_model(config, spec, device)
        algorithm = build_algorithm(config.algorithm, Actions(spec, config.model.squash), model)
        sizes = StoreSizes.of(config, core_size_of(model), algorithm.overlap)
        store = Store(spec, Fifo(), sizes, device, memory=_memory_of(config, device))
        learner = Learner(config, model, algorithm, LearningMetrics(), env_steps=lambda: 0, prefer=store.prefer)
        learner.assist(store.blank(config.algorithm.batch_size))


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
