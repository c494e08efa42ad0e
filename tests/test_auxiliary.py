"""Auxiliary losses of a model: summed and reported for any algorithm, and absent where nothing is trained."""

from typing import Any

import pytest
import torch
from torch import Tensor

from seedrl.actions import Actions
from seedrl.algorithms.auxiliary import whole_loss
from seedrl.algorithms.base import Batch, Forward, Loss
from seedrl.algorithms.build import build_algorithm
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.errors import ConfigError
from seedrl.types import ModelInput, ModelOutput
from tests.builders import learner_parts, model_input, one_step, weights
from tests.fakes import AuxModel, TinyModel, make_spec

SPEC = make_spec()
VALID = torch.tensor([[True, False], [True, True]])  # [T, B]


class Silent:
    """An algorithm that knows nothing of auxiliary losses, and has none of its own."""

    def valid(self, batch: Batch) -> Tensor:
        return VALID

    def loss(self, batch: Batch, forward: Forward, fraction: float) -> Loss:
        forward(batch, torch.zeros(2, 0))
        with torch.no_grad():
            forward(batch, torch.zeros(2, 0))
        return Loss(torch.tensor(10.0), {"own": torch.tensor(1.0)})


def loss_with(aux: dict[str, Tensor] | None, algorithm: Any = None) -> Loss:
    passes: list[bool] = []

    def forward(inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        passes.append(torch.is_grad_enabled())
        nothing = torch.zeros(3, 2)
        return ModelOutput(nothing, nothing, aux if passes[-1] else {"other": torch.tensor(99.0)}), core_state

    return whole_loss(algorithm or Silent(), model_input(SPEC, 3, 2), forward, 0.0)


def test_auxiliary_losses_are_added_and_reported_by_name() -> None:
    loss = loss_with({"one": torch.tensor(2.0), "two": torch.tensor(3.0)})
    assert loss.total == 15
    assert loss.report == {"own": 1, "aux_one": 2, "aux_two": 3}


def test_auxiliary_loss_per_row_is_a_mean_over_valid_transitions() -> None:
    """The second unroll has one transition, and no transition begins at the last row."""
    rows = torch.tensor([[1.0, 100.0], [2.0, 6.0], [100.0, 100.0]], requires_grad=True)
    loss = loss_with({"one": rows})
    assert loss.report["aux_one"] == 3
    assert not loss.report["aux_one"].requires_grad
    loss.total.backward()
    torch.testing.assert_close(rows.grad, torch.tensor([[1, 0], [1, 1], [0, 0]]) / 3)


@pytest.mark.parametrize("aux", [None, {}])
def test_loss_without_auxiliary_losses_is_that_of_the_algorithm(aux: dict[str, Tensor] | None) -> None:
    loss = loss_with(aux)
    assert (loss.total, loss.report) == (10, {"own": 1})


def test_auxiliary_loss_of_another_shape_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"auxiliary loss 'one' has shape \[2\]"):
        loss_with({"one": torch.zeros(2)})


@pytest.mark.parametrize("core_size", [0, 3])
@pytest.mark.parametrize("settings", [{}, {"name": "ppo", "passes": 2, "minibatches": 2, "on_policy": False}])
def test_auxiliary_losses_are_trained_by_every_algorithm(settings: dict[str, Any], core_size: int) -> None:
    """With PPO, batches are transitions in any order, or parts of unrolls if the model has a memory."""
    parts = learner_parts(one_step(**settings), AuxModel(SPEC, core_size), SPEC)
    before = weights(parts.learner.model)["reward.weight"]
    parts.record()
    assert parts.update()
    assert not torch.equal(weights(parts.learner.model)["reward.weight"], before)
    reported = parts.metrics.algorithm
    assert reported["aux_reward"] > 0
    own = reported["policy_loss"] + 0.5 * reported["value_loss"] - 0.01 * reported["entropy"]
    assert reported["loss"] == pytest.approx(own + reported["aux_reward"] + reported["aux_size"], rel=1e-4)


def test_auxiliary_losses_leave_the_gradient_of_everything_else_alone() -> None:
    """The head has weights of its own here, so those of policy and value move as they do without it."""
    torch.manual_seed(0)
    model = AuxModel(SPEC)
    plain = TinyModel(SPEC)
    plain.load_state_dict({name: each for name, each in model.state_dict().items() if not name.startswith("reward")})
    gradients = []
    for each in (model, plain):
        parts = learner_parts(one_step(), each, SPEC)
        parts.record()
        unrolls = parts.store.take(2, timeout=0)
        assert unrolls is not None
        algorithm = build_algorithm(AlgorithmConfig(**vars(one_step())), Actions(SPEC), each)
        whole_loss(algorithm, unrolls, each, 0.0).total.backward()
        assert each.heads.weight.grad is not None
        gradients.append(each.heads.weight.grad)
    torch.testing.assert_close(*gradients)
