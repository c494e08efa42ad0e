"""The same run on the simulated accelerator and on the CPU: the same actions, the same weights."""

from typing import Any

import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import seedrl.columns
import seedrl.serving.staging
from seedrl.algorithms.neutral import resolve
from seedrl.algorithms.settings import AlgorithmConfig, DQNConfig, Optimizer
from seedrl.config import LearnerConfig, ModelConfig
from seedrl.device import Staging
from seedrl.serving.seats import Exploration, Seat
from seedrl.specs import ArraySpec, ContinuousSpec, EnvSpec, discrete
from tests.accelerator.rig import LENGTH, Loop, Played
from tests.accelerator.simulated import GPU

CPU = torch.device("cpu")
VECTOR = EnvSpec(ArraySpec((3,), "float32"), discrete(3))
CONTINUOUS = EnvSpec(ArraySpec((3,), "float32"), ContinuousSpec((-1.0, -2.0), (1.0, 2.0), (2,)))


def image(*shape: int) -> EnvSpec:
    return EnvSpec(ArraySpec(shape, "uint8"), discrete(3))


MODELS: dict[str, tuple[ModelConfig, EnvSpec, int]] = {
    "mlp": (ModelConfig(name="mlp"), VECTOR, 1),
    "mlp plain": (ModelConfig(name="mlp", normalize=False, popart=False, layer_norm=True), VECTOR, 1),
    "mlp stacked": (ModelConfig(name="mlp"), VECTOR, 3),
    "mlp lstm": (ModelConfig(name="mlp", lstm=8), VECTOR, 1),
    "mlp gru": (ModelConfig(name="mlp", gru=8), VECTOR, 1),
    "mlp bool": (ModelConfig(name="mlp"), EnvSpec(ArraySpec((8,), "bool"), discrete(2)), 1),
    "mlp float64": (ModelConfig(name="mlp"), EnvSpec(ArraySpec((3,), "float64"), discrete(2)), 1),
    "gaussian": (ModelConfig(name="mlp"), CONTINUOUS, 1),
    "state_std": (ModelConfig(name="mlp", state_std=True, squash=True), CONTINUOUS, 1),
    "nature": (ModelConfig(name="nature"), image(1, 36, 36), 4),
    "nature lstm": (ModelConfig(name="nature", lstm=4), image(1, 36, 36), 2),
    "impala": (ModelConfig(name="impala"), image(8, 8, 3), 1),
    "grid": (ModelConfig(name="grid"), image(5, 5, 3), 1),
    "tiny": (ModelConfig(name="tiny"), image(1, 9, 9), 1),
    "dict with mask": (
        ModelConfig(),
        EnvSpec(
            {
                "seen": ArraySpec((5, 5, 3), "uint8"),
                "known": ArraySpec((3,), "float32"),
                "action_mask": ArraySpec((3,), "int8"),
            },
            discrete(3),
        ),
        1,
    ),
    "several actions": (
        ModelConfig(name="mlp"),
        EnvSpec(
            ArraySpec((3,), "float32"),
            {"move": ContinuousSpec((-1.0,), (1.0,), (1,)), "press": discrete(4)},
        ),
        1,
    ),
}
MEMORY = ModelConfig(name="mlp", lstm=4)
VALUES = ModelConfig(name="mlp", popart=False)
ALGORITHMS: dict[str, tuple[AlgorithmConfig, ModelConfig, EnvSpec]] = {
    "vtrace": (AlgorithmConfig(name="vtrace"), ModelConfig(name="mlp"), VECTOR),
    "ppo": (AlgorithmConfig(name="ppo"), ModelConfig(name="mlp"), VECTOR),
    "ppo with memory": (AlgorithmConfig(name="ppo"), MEMORY, VECTOR),
    "pqn": (AlgorithmConfig(name="pqn"), VALUES, VECTOR),
    "dqn": (AlgorithmConfig(name="dqn"), VALUES, VECTOR),
    "r2d2": (
        AlgorithmConfig(name="dqn", dqn=DQNConfig(n_steps=2, burn_in=1, rescale=True)),
        ModelConfig(name="mlp", lstm=4, popart=False),
        VECTOR,
    ),
    "sac": (
        AlgorithmConfig(name="sac"),
        ModelConfig(name="mlp", popart=False, squash=True, state_std=True, separate=False),
        CONTINUOUS,
    ),
    "bc": (AlgorithmConfig(name="bc"), ModelConfig(name="mlp"), VECTOR),
    "rmsprop": (AlgorithmConfig(name="vtrace", optimizer=Optimizer.rmsprop), ModelConfig(name="mlp"), VECTOR),
}


def same(got: Played, expected: Played) -> None:
    assert got.metrics.updates == expected.metrics.updates >= 2
    assert got.metrics.skipped_updates == 0
    for mine, other in zip(got.actions, expected.actions, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(other), rtol=1e-3, atol=1e-4)
    for name, mine_weights in got.weights.items():
        torch.testing.assert_close(mine_weights, expected.weights[name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("kind", MODELS)
def test_model_on_the_accelerator_acts_and_learns_as_on_the_cpu(kind: str) -> None:
    config, spec, frame_stack = MODELS[kind]

    def play(device: torch.device) -> Played:
        return Loop(spec, config, device, frame_stack=frame_stack).play(3 * LENGTH, requests=2)

    same(play(GPU), play(CPU))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithm_on_the_accelerator_learns_as_on_the_cpu(name: str) -> None:
    algorithm, model, spec = ALGORITHMS[name]

    def play(device: torch.device) -> Played:
        config = resolve(LearnerConfig(algorithm=algorithm, model=model), spec).algorithm
        config.passes, config.minibatches = 1, 2
        return Loop(spec, model, device, config).play(3 * LENGTH)

    same(play(GPU), play(CPU))


def test_host_tensor_among_those_of_the_device_is_refused() -> None:
    """Without this, parity would prove nothing."""
    with pytest.raises(RuntimeError, match="tensors of the host"):
        torch.zeros(3, device=GPU) + torch.zeros(3)


class ForgetfulStaging(Staging):
    """Leaves one of the arrays on the host."""

    forgotten = 0

    def upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        there = super().upload(*arrays)
        there[self.forgotten % len(arrays)] = torch.from_numpy(arrays[self.forgotten % len(arrays)])
        return there


@pytest.mark.parametrize("forgotten", range(10))
@pytest.mark.parametrize("module", [seedrl.columns, seedrl.serving.staging])
def test_upload_that_is_forgotten_is_noticed(module: Any, forgotten: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Staging", ForgetfulStaging)
    monkeypatch.setattr(ForgetfulStaging, "forgotten", forgotten)
    config, spec, frame_stack = MODELS["nature lstm"]
    seats = [Seat(exploration=Exploration(2.0, 0.1))] * 4
    with pytest.raises(RuntimeError, match="tensors of the host"):
        Loop(spec, config, GPU, frame_stack=frame_stack).play(2 * LENGTH, seats=seats)
