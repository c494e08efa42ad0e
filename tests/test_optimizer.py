"""Optimisers by their first steps, schedules and clipping by their values."""

import math

import pytest
import torch
from torch import nn

from seedrl.algorithms.settings import AlgorithmConfig, Optimizer
from seedrl.algorithms.transitions import linear
from seedrl.learning.optimizer import build_optimizer, clip_gradients

GRADIENTS = [2.0, -0.5]


def stepped(config: AlgorithmConfig, gradients: list[float]) -> list[float]:
    """A parameter of 1 after each step with one of these gradients."""
    parameter = nn.Parameter(torch.ones(1))
    optimizer = build_optimizer(config, [parameter])
    values = []
    for gradient in gradients:
        parameter.grad = torch.tensor([gradient])
        optimizer.step()
        values.append(parameter.item())
    return values


@pytest.mark.parametrize(
    ("fraction", "value"), [(0.0, 4.0), (0.25, 3.5), (0.5, 3.0), (1.0, 2.0), (1.5, 2.0), (-0.5, 4.0)]
)
def test_linear_with_an_end_goes_there_and_stays(fraction: float, value: float) -> None:
    assert linear(4.0, 2.0, fraction) == value


@pytest.mark.parametrize("fraction", [0.0, 0.5, 2.0])
def test_linear_without_an_end_is_constant(fraction: float) -> None:
    assert linear(4.0, None, fraction) == 4.0


def test_linear_with_an_end_of_zero_reaches_zero() -> None:
    assert linear(4.0, 0.0, 1.0) == 0.0


def test_build_optimizer_adam_steps_as_its_paper() -> None:
    config = AlgorithmConfig(optimizer=Optimizer.adam, learning_rate=0.1, epsilon=0.3)
    expected, value, first, second = [], 1.0, 0.0, 0.0
    for step, gradient in enumerate(GRADIENTS, start=1):
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        value -= 0.1 * (first / (1 - 0.9**step)) / (math.sqrt(second / (1 - 0.999**step)) + 0.3)
        expected.append(value)
    assert stepped(config, GRADIENTS) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_build_optimizer_rmsprop_steps_with_its_decay_epsilon_and_momentum(momentum: float) -> None:
    config = AlgorithmConfig(
        optimizer=Optimizer.rmsprop, learning_rate=0.1, epsilon=0.3, rmsprop_decay=0.8, rmsprop_momentum=momentum
    )
    expected, value, square, velocity = [], 1.0, 0.0, 0.0
    for gradient in GRADIENTS:
        square = 0.8 * square + 0.2 * gradient**2
        velocity = momentum * velocity + gradient / (math.sqrt(square) + 0.3)
        value -= 0.1 * velocity
        expected.append(value)
    assert stepped(config, GRADIENTS) == pytest.approx(expected, rel=1e-5)


def parameters_with_gradient(*gradients: list[float]) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(len(gradient)))
        parameter.grad = torch.tensor(gradient)
        parameters.append(parameter)
    return parameters


def gradients_of(parameters: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([parameter.grad for parameter in parameters if parameter.grad is not None])


@pytest.mark.parametrize(
    ("max_norm", "expected"),
    [(1.0, [0.6, 0.8]), (10.0, [3.0, 4.0]), (0.0, [3.0, 4.0])],
    ids=["above", "below", "switched off"],
)
def test_clip_gradients_scales_down_to_the_norm_and_returns_the_old_one(max_norm: float, expected: list[float]) -> None:
    parameters = parameters_with_gradient([3.0], [4.0])
    norm = clip_gradients(parameters, max_norm)
    assert norm.item() == pytest.approx(5.0)
    torch.testing.assert_close(gradients_of(parameters), torch.tensor(expected))


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_clip_gradients_not_finite_returns_a_norm_that_is_not_finite(bad: float, max_norm: float) -> None:
    assert not torch.isfinite(clip_gradients(parameters_with_gradient([1.0], [bad]), max_norm))


def test_clip_gradients_parameter_without_gradient_is_left_out() -> None:
    parameters = [*parameters_with_gradient([3.0, 4.0]), nn.Parameter(torch.zeros(2))]
    assert clip_gradients(parameters, 0.0).item() == pytest.approx(5.0)
    assert parameters[1].grad is None
