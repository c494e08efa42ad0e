"""A teacher: the distance from it is a term of any actor-critic's loss, with a schedule, and guides the policy."""

from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

from seedrl.actions import Actions
from seedrl.algorithms.build import build_algorithm
from seedrl.algorithms.signs import signs_of
from seedrl.algorithms.teacher import Taught
from seedrl.config import LearnerConfig
from seedrl.errors import ConfigError
from seedrl.specs import CategoricalSpec, ContinuousSpec, EnvSpec
from seedrl.validation import check
from tests.builders import learner_parts, model_input, one_step
from tests.fakes import TinyModel, make_spec

SPEC = make_spec(num_actions=4)
BOTH = pytest.mark.parametrize("name", ["ppo", "vtrace"])


def other_model(core_size: int = 0) -> TinyModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        return TinyModel(SPEC, core_size)


def parts_of(name: str, **settings: Any) -> Any:
    """Return a learner whose algorithm has a teacher, and a train batch that waits for it."""
    algorithm = one_step(name=name, **settings)
    parts = learner_parts(algorithm, spec=SPEC)
    actions = Actions(SPEC)
    plain = build_algorithm(algorithm, actions, parts.learner.model)
    parts.record()
    return parts, plain, Taught(plain, other_model(), actions, algorithm)


# The divergence.


def test_divergence_of_choices_is_that_of_torch() -> None:
    actions = Actions(EnvSpec(SPEC.observation, {"a": CategoricalSpec((3, 2), (2,)), "b": CategoricalSpec((4,))}))
    ours, other = torch.randn(2, 5, 7, 9)
    expected = sum(
        distributions.kl_divergence(distributions.Categorical(logits=a), distributions.Categorical(logits=b))
        for a, b in zip(ours.split([3, 2, 4], dim=-1), other.split([3, 2, 4], dim=-1), strict=True)
    )
    torch.testing.assert_close(actions.divergence(ours, other), expected)
    assert actions.divergence(ours, ours).abs().max() < 1e-6


def test_divergence_of_continuous_actions_is_that_of_torch() -> None:
    actions = Actions(EnvSpec(SPEC.observation, ContinuousSpec((-1.0,) * 3, (1.0,) * 3, (3,))))
    ours, other = 0.3 * torch.randn(2, 5, 6)

    def normal(parameters: Tensor) -> distributions.Normal:
        mean, log_std = parameters.chunk(2, dim=-1)
        return distributions.Normal(mean, log_std.exp())

    expected = distributions.kl_divergence(normal(ours), normal(other)).sum(dim=-1)
    torch.testing.assert_close(actions.divergence(ours, other), expected)


# The loss.


@BOTH
def test_loss_has_the_mean_divergence_of_valid_transitions_as_a_further_term(name: str) -> None:
    parts, plain, taught = parts_of(name, teacher_cost=0.7, teacher_cost_end=0.1, teacher_decay=0.5)
    unrolls = parts.store.take(2, timeout=0)
    model = parts.learner.model
    for fraction, cost in ((0.0, 0.7), (0.25, 0.4), (0.5, 0.1), (1.0, 0.1)):
        batch = next(iter(taught.batches(unrolls)))
        without, loss = plain.loss(batch, model, fraction), taught.loss(batch, model, fraction)
        valid = taught.valid(batch)
        policies = [
            distributions.Categorical(logits=each(batch.inputs, batch.core_state)[0].logits[: len(valid)])
            for each in (other_model(), model)
        ]
        expected = distributions.kl_divergence(*policies)[valid].mean()
        torch.testing.assert_close(loss.total - without.total, cost * expected)
        torch.testing.assert_close(loss.report["teacher_kl"], expected.detach())
        assert loss.report["teacher_cost"] == pytest.approx(cost)
        assert loss.report.keys() - without.report.keys() == {"teacher_kl", "teacher_cost"}


@BOTH
def test_loss_without_a_cost_is_that_of_the_algorithm_and_runs_no_teacher(name: str) -> None:
    parts, plain, taught = parts_of(name, teacher_cost=1.0, teacher_cost_end=0.0, teacher_decay=0.5)
    batch = next(iter(taught.batches(parts.store.take(2, timeout=0))))
    taught._teacher.register_forward_hook(lambda *_: pytest.fail("the teacher was asked"))
    loss = taught.loss(batch, parts.learner.model, 0.6)
    assert torch.equal(loss.total, plain.loss(batch, parts.learner.model, 0.6).total)
    assert loss.report["teacher_kl"] == 0


@BOTH
def test_policy_that_is_taught_becomes_the_teachers(name: str) -> None:
    parts, _, taught = parts_of(name, teacher_cost=100.0, teacher_cost_end=100.0, max_grad_norm=0.0)
    unrolls, model = parts.store.take(2, timeout=0), parts.learner.model
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    distances = []
    for _ in range(150):
        loss = taught.loss(next(iter(taught.batches(unrolls))), model, 0.0)
        optimizer.zero_grad()
        loss.total.backward()
        optimizer.step()
        distances.append(float(loss.report["teacher_kl"]))
    assert distances[-1] < 0.02 * distances[0]
    assert not any(parameter.requires_grad for parameter in taught._teacher.parameters())


def test_teacher_with_a_memory_follows_the_unroll() -> None:
    parts, _, _ = parts_of("vtrace")
    algorithm = one_step()
    model, teacher = TinyModel(SPEC, 3), other_model(core_size=2)
    taught = Taught(build_algorithm(algorithm, Actions(SPEC), model), teacher, Actions(SPEC), algorithm)
    inputs = model_input(SPEC, 4, 2)
    unrolls = parts.store.take(2, timeout=0)._replace(inputs=inputs, core_state=torch.randn(2, 3))
    loss = taught.loss(unrolls, model, 0.0)
    expected = distributions.kl_divergence(
        distributions.Categorical(logits=teacher(inputs, torch.zeros(2, 2))[0].logits[:-1]),
        distributions.Categorical(logits=model(inputs, unrolls.core_state)[0].logits[:-1]),
    )[taught.valid(unrolls)].mean()
    torch.testing.assert_close(loss.report["teacher_kl"], expected.detach())


def test_algorithm_with_a_teacher_keeps_what_only_it_has() -> None:
    _, plain, taught = parts_of("ppo")
    assert signs_of(taught) == signs_of(plain)
    assert isinstance(getattr(taught, "networks", nn.Module()), nn.Module)
    assert not hasattr(taught, "initial_priority")


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("dqn", {}, "guides a policy; algorithm.name=dqn is none of ppo, vtrace"),
        ("ppo", {"teacher_cost": -1.0}, "teacher_cost=-1.0 must not be negative"),
        ("ppo", {"teacher_decay": 0.0}, "teacher_decay=0.0 must be more than 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(name: str, settings: dict[str, Any], words: str) -> None:
    config = LearnerConfig(teacher="runs/expert", algorithm=one_step(name=name, **settings))
    if name == "dqn":
        config.store.select = "uniform"
        config.store.samples_per_insert = 4.0
    with pytest.raises(ConfigError, match=words):
        check(config)
