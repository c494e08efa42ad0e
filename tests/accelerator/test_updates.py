"""Updates on the simulated accelerator: steps that the device skips by itself, reports that are read late."""

import math

import pytest
import torch
from torch import Tensor

from seedrl.config import ModelConfig
from seedrl.learning.learner import PATIENCE
from seedrl.specs import ArraySpec, EnvSpec, discrete
from seedrl.types import Unrolls
from tests.accelerator.rig import BATCH, Loop
from tests.accelerator.simulated import GPU

CPU = torch.device("cpu")
SPEC = EnvSpec(ArraySpec((3,), "float32"), discrete(3))


def with_batches(device: torch.device, count: int) -> tuple[Loop, list[Unrolls]]:
    """Return a loop, and train batches that it has recorded."""
    rig = Loop(SPEC, ModelConfig(name="mlp"), device)
    sessions, batches = rig.join_all(), []
    while len(batches) < count:
        rig.step(sessions)
        if (unrolls := rig.store.take(BATCH, timeout=0)) is not None:
            batches.append(unrolls)
    return rig, batches


def spoiled(unrolls: Unrolls) -> Unrolls:
    """Return unrolls with rewards that make the loss other than finite."""
    return unrolls._replace(inputs=unrolls.inputs._replace(reward=torch.full_like(unrolls.inputs.reward, math.inf)))


def state(rig: Loop) -> dict[str, Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in rig.learner.tensors().items()}


@pytest.mark.parametrize("device", [GPU, CPU], ids=str)
def test_step_that_is_not_finite_changes_nothing(device: torch.device) -> None:
    rig, batches = with_batches(device, 2)
    rig.learner.train(batches[0])
    before = state(rig)
    rig.learner.train(spoiled(batches[1]))
    after = state(rig)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_training_after_a_skipped_step_is_that_of_the_cpu() -> None:
    states = []
    for device in (GPU, CPU):
        rig, batches = with_batches(device, 3)
        for batch in (batches[0], spoiled(batches[1]), batches[2]):
            rig.learner.train(batch)
        states.append(state(rig))
    for name, mine in states[0].items():
        torch.testing.assert_close(mine, states[1][name], rtol=1e-3, atol=1e-5, msg=name)


def test_skipped_steps_and_reports_are_known_an_update_later() -> None:
    rig, batches = with_batches(GPU, 1)
    rig.learner.train(spoiled(batches[0]))
    assert (rig.learning.skipped_updates, rig.learner.skipped_in_a_row) == (0, 0)
    assert not rig.learning.algorithm
    rig.learner.train(batches[0])
    assert (rig.learning.skipped_updates, rig.learner.skipped_in_a_row) == (1, 1)
    assert not rig.learning.algorithm
    rig.learner.train(batches[0])
    assert (rig.learning.skipped_updates, rig.learner.skipped_in_a_row) == (1, 0)
    assert math.isfinite(rig.learning.algorithm["loss"])
    assert rig.learning.grad_norm > 0


def test_divergence_is_noticed() -> None:
    rig, batches = with_batches(GPU, 1)
    for _ in range(PATIENCE + 1):
        assert not rig.learner.has_diverged
        rig.learner.train(spoiled(batches[0]))
    assert rig.learner.has_diverged
