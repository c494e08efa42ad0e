"""Behaviour cloning: its loss against a direct computation, its values on a chain, and a policy that it imitates."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms.bc import BC, distance
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.config import ModelConfig
from seedrl.models.build import build_model
from seedrl.specs import ArraySpec, CategoricalSpec, ContinuousSpec, EnvSpec
from seedrl.types import ModelInput, ModelOutput, Unrolls
from tests.builders import learner_parts, one_step, same, weights
from tests.fakes import make_spec
from tests.oracles import DISCOUNT, END, UNTRAINED, VALUES, chain_rows, learn, to_unrolls

torch.set_num_threads(1)  # for tensors this small a second thread only waits


def settings(**changes: Any) -> AlgorithmConfig:
    return one_step(**{"name": "bc", "discount": DISCOUNT, "trace_lambda": 0.7, **changes})


class Table(nn.Module):
    """Logits and a value of every position."""

    core_size = 0

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(END + 1, 2))
        self.values = nn.Parameter(torch.full((END + 1,), UNTRAINED))

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        return ModelOutput(inputs.observation @ self.logits, inputs.observation @ self.values), core_state


def trained(unrolls: Unrolls) -> Table:
    table = Table()
    learn(BC(settings(), Actions(make_spec(num_actions=2)), table), table, unrolls, steps=300, rate=6.0)
    return table


def test_training_learns_how_often_each_action_was_taken_and_what_positions_are_worth() -> None:
    """The best fit of a table: the share of each action in each position, rows that end an episode left out."""
    rows = chain_rows(600)
    table, valid = trained(to_unrolls(rows)), ~(rows["terminated"] | rows["truncated"])[:-1]
    for position in range(END):
        taken = rows["action"][:-1][valid & (rows["position"][:-1] == position)]
        share = table.logits[position].softmax(dim=-1)[1].item()
        assert share == pytest.approx(taken.float().mean().item(), abs=0.02)
    torch.testing.assert_close(table.values.detach()[:END], VALUES, rtol=0, atol=1e-2)
    assert table.logits[END].tolist() == [0.0, 0.0]


def test_loss_is_minus_the_mean_log_probability_of_valid_transitions() -> None:
    unrolls = to_unrolls(chain_rows(100))
    weighted = unrolls._replace(weight=torch.linspace(0.5, 1.5, unrolls.columns))
    table = Table()
    with torch.no_grad():
        table.logits.copy_(torch.randn(END + 1, 2, generator=torch.Generator().manual_seed(1)))
    algorithm = BC(settings(value_cost=0.0), Actions(make_spec(num_actions=2)), table)
    (batch,) = algorithm.batches(weighted)
    total, count = 0.0, 0
    log_policy = (unrolls.inputs.observation @ table.logits.detach()).log_softmax(dim=-1)
    for t in range(len(unrolls.action) - 1):
        for b in range(unrolls.columns):
            if not (unrolls.terminated | unrolls.truncated)[t, b]:
                total -= float(weighted.weight[b] * log_policy[t, b, unrolls.action[t, b]])
                count += 1
    assert algorithm.loss(batch, table, 0.0).total.item() == pytest.approx(total / count, rel=1e-5)


BOX = ContinuousSpec((-1.0, -2.0), (1.0, 2.0), (2,))


@pytest.mark.parametrize(
    ("action", "parameters", "taken", "expected"),
    [
        (CategoricalSpec((3,), ()), [0.0, 2.0, 1.0], 1, 0.0),
        (CategoricalSpec((3,), ()), [0.0, 2.0, 1.0], 0, 1.0),
        (CategoricalSpec((2, 3), (2,)), [1.0, 0.0, 0.0, 2.0, 1.0], [0, 0], 0.5),
        (BOX, [0.0, 50.0, 0.0, 0.0], [0.0, -50.0], 0.5),
    ],
)
def test_distance_is_a_share_of_choices_or_of_the_bounds(
    action: Any, parameters: list[float], taken: Any, expected: float
) -> None:
    actions = Actions(EnvSpec(ArraySpec((2,), "float32"), action))
    found = distance(actions, torch.tensor([[parameters]]), torch.tensor([[taken]]))
    assert found.tolist() == [[pytest.approx(expected)]]


@pytest.mark.parametrize("lstm", [0, 4])
def test_train_imitates_another_policy(lstm: int) -> None:
    spec, model = make_spec((4,), num_actions=2), ModelConfig(layers=[16], lstm=lstm, normalize=False)
    teacher = build_model(replace(model, lstm=0, layers=[]), spec, seed=5)
    with torch.no_grad():
        teacher.policy_head.weight.mul_(300)  # type: ignore[union-attr, operator]
    parts = learner_parts(settings(learning_rate=0.03), build_model(model, spec, seed=1), spec, batch_size=32)
    before = weights(parts.learner.model)
    for number in range(40):
        observation = torch.randn(4, 32, 4, generator=torch.Generator().manual_seed(number))
        unrolls = parts.store.blank(32)
        inputs = unrolls.inputs._replace(observation=observation)
        with torch.no_grad():
            output, _ = teacher(inputs, torch.zeros(32, 0))
        nothing = torch.zeros_like(unrolls.terminated)
        parts.learner.train(
            unrolls._replace(
                inputs=inputs,
                terminated=nothing,
                truncated=nothing,
                action=output.logits.argmax(dim=-1),
                weight=torch.ones(32),
            )
        )
    assert not same(before, weights(parts.learner.model))
    assert parts.metrics.algorithm["distance"] < 0.1
