"""A ring in the memory of the host (`store.device=host`) beside an accelerator is the same as one on the device."""

import pytest
import torch
from torch import Tensor

from seedrl.algorithms.neutral import resolve
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.config import LearnerConfig
from seedrl.selection.base import Selector
from seedrl.selection.build import build_selector
from seedrl.types import Unrolls
from tests.accelerator.rig import BATCH, LENGTH, Loop, Played
from tests.accelerator.simulated import GPU, GpuTensor
from tests.accelerator.test_parity import CPU, MODELS, VALUES, VECTOR, same

SELECTS = ("uniform", "priority", "mixed")
KINDS = ("mlp", "mlp lstm", "mlp stacked", "nature lstm", "dict with mask", "several actions")
CAPACITY = 12


def selector_of(select: str, seed: int = 1) -> Selector:
    """Return a replay memory that samples every unroll three times, with settings for unrolls of a few steps."""
    config = LearnerConfig(seed=seed)
    config.algorithm.batch_size, config.serving.max_slots = BATCH, 8
    config.store.select, config.store.capacity = select, CAPACITY
    config.store.samples_per_insert, config.store.tolerance = (0.0 if select == "mixed" else 3.0), 100.0
    return build_selector(config)


def replaying(select: str, device: torch.device, memory: torch.device, seed: int = 1, slots: int = 4) -> Loop:
    """Return a loop of DQN, whose errors are the priorities, with a memory that overflows soon."""
    settings = resolve(LearnerConfig(algorithm=AlgorithmConfig(name="dqn"), model=VALUES), VECTOR).algorithm
    settings.passes, settings.minibatches = 1, 1
    selector = selector_of(select, seed)
    return Loop(VECTOR, VALUES, device, settings, slots=slots, capacity=CAPACITY, selector=selector, memory=memory)


def made_by(kind: str, device: torch.device, memory: torch.device) -> Loop:
    config, spec, frame_stack = MODELS[kind]
    return Loop(spec, config, device, frame_stack=frame_stack, memory=memory)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("requests", [1, 2])
def test_run_with_the_ring_on_the_host_acts_and_learns_as_on_the_cpu(kind: str, requests: int) -> None:
    def play(device: torch.device) -> Played:
        return made_by(kind, device, CPU).play(3 * LENGTH, requests)

    same(play(GPU), play(CPU))


@pytest.mark.parametrize("kind", KINDS)
def test_unrolls_on_the_host_replayed_on_the_device_reproduce_what_inference_computed(kind: str) -> None:
    loop = made_by(kind, GPU, CPU)
    sessions = loop.join_all(requests=2)
    for _ in range(3 * LENGTH):
        loop.step(sessions)
    unrolls = loop.store.take(loop.store.ready, timeout=0)
    assert unrolls is not None
    assert unrolls.columns >= 8
    assert_on_device(unrolls)
    with torch.no_grad():
        output, _ = loop.model(unrolls.inputs, unrolls.core_state)
    torch.testing.assert_close(output.logits.cpu(), unrolls.behavior_logits.cpu(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output.value.cpu(), unrolls.behavior_value.cpu(), rtol=1e-4, atol=1e-5)


def assert_on_device(unrolls: Unrolls) -> None:
    assert all(isinstance(tensor, GpuTensor) for tensor in unrolls.tensors())


def test_ring_on_the_host_takes_no_memory_of_the_device() -> None:
    columns = made_by("nature lstm", GPU, CPU).store.columns
    held = [*columns._unrolls().values(), columns._next_core_state]
    assert not any(isinstance(tensor, GpuTensor) for tensor in held)
    on_device = made_by("nature lstm", GPU, GPU).store.columns
    assert columns.nbytes == on_device.nbytes > 10**5


@pytest.mark.parametrize("select", SELECTS)
def test_replay_from_the_host_draws_and_learns_as_from_the_device(select: str) -> None:
    """The draws follow from the seed and from the priorities that training returns."""
    played = [replaying(select, device, memory).play(7 * LENGTH) for device, memory in ((GPU, CPU), (GPU, GPU))]
    same(*played)
    assert played[0].metrics.updates >= 6


def test_priorities_of_unrolls_on_the_host_are_those_on_the_device() -> None:
    masses = []
    for memory in (CPU, GPU):
        loop = replaying("priority", GPU, memory)
        loop.play(7 * LENGTH)
        masses.append(loop.store.tensors()["selector/mass"])
    assert len(masses[0].unique()) > CAPACITY // 2
    torch.testing.assert_close(*masses, rtol=1e-4, atol=1e-6)


def stored(loop: Loop) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in loop.store.tensors().items()}


@pytest.mark.parametrize("memory", [CPU, GPU], ids=["to the host", "to the device"])
@pytest.mark.parametrize("select", SELECTS)
def test_ring_on_the_host_is_restored_bit_for_bit_wherever_the_next_one_is(select: str, memory: torch.device) -> None:
    loop = replaying(select, GPU, CPU)
    loop.play(7 * LENGTH)
    saved, other = stored(loop), replaying(select, GPU, memory, seed=2, slots=8)
    assert other.store.load(saved)
    restored = stored(other)
    assert restored.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in restored.items())
    batches = [each.store.take(BATCH, timeout=0) for each in (loop, other)]
    if select != "mixed":  # which has nothing new to train on
        mine, theirs = (batch for batch in batches if batch is not None)
        assert_on_device(theirs)
        assert all(torch.equal(*pair) for pair in zip(mine.tensors(), theirs.tensors(), strict=True))
