"""Running statistics in training: they change with an update that counts, and with no other."""

import pytest
import torch
from torch import Tensor

from seedrl.config import ModelConfig
from seedrl.models.base import popart_of
from seedrl.models.build import build_model
from seedrl.types import Unrolls
from tests.builders import LearnerParts, learner_parts, same, weights
from tests.fakes import make_spec

SPEC = make_spec((3,))
IMAGES = make_spec((1, 36, 36))
NORMALIZED = ModelConfig(layers=[8], normalize=True, popart=False)


def parts_of(config: ModelConfig, images: bool = False) -> LearnerParts:
    spec = IMAGES if images else SPEC
    return learner_parts(model=build_model(config, spec, seed=1), spec=spec)


def taken(parts: LearnerParts, seed: int) -> Unrolls:
    parts.record(seed=seed)
    unrolls = parts.store.take(parts.config.algorithm.batch_size, timeout=0)
    assert unrolls is not None
    return unrolls


def statistics(parts: LearnerParts) -> dict[str, Tensor]:
    found = {name: tensor for name, tensor in weights(parts.learner.model).items() if name.endswith(("mean", "seen"))}
    assert found
    return found


def test_update_with_a_huge_observation_changes_no_statistics_and_later_ones_do() -> None:
    """One value of 2e19, whose square is infinite in float32, made all later updates be skipped."""
    parts = parts_of(NORMALIZED)
    parts.learner.train(taken(parts, seed=1))
    before = statistics(parts)
    unrolls = taken(parts, seed=2)
    assert isinstance(unrolls.inputs.observation, Tensor)
    unrolls.inputs.observation[1, 0, 0] = 2e19
    parts.learner.train(unrolls)
    assert same(before, statistics(parts))
    for seed in (3, 4):
        parts.learner.train(taken(parts, seed=seed))
    assert parts.metrics.skipped_updates == 0
    assert not same(before, statistics(parts))
    assert all(torch.isfinite(tensor).all() for tensor in parts.learner.model.state_dict().values())


@pytest.mark.parametrize(
    ("config", "images"),
    [(NORMALIZED, False), (ModelConfig("nature"), True), (ModelConfig(layers=[8], popart=True, normalize=True), False)],
    ids=["normalize", "centre", "popart"],
)
def test_update_that_is_skipped_changes_no_statistics(config: ModelConfig, images: bool) -> None:
    parts = parts_of(config, images)
    unrolls = taken(parts, seed=1)
    before = weights(parts.learner.model)
    parts.learner.train(unrolls._replace(inputs=unrolls.inputs._replace(reward=unrolls.inputs.reward + float("inf"))))
    assert parts.metrics.skipped_updates == 1
    assert same(before, weights(parts.learner.model))
    other = parts_of(config, images)
    for each in (parts, other):
        each.learner.train(taken(each, seed=2))
    assert same(statistics(parts), statistics(other))


def test_update_with_popart_follows_targets_far_from_zero() -> None:
    parts = learner_parts(model=build_model(ModelConfig(layers=[8], popart=True), SPEC, seed=1), spec=SPEC)
    popart = popart_of(parts.learner.model)
    assert popart is not None
    parts.config.algorithm.learning_rate = parts.config.algorithm.learning_rate_end = 0.0
    generator = torch.Generator().manual_seed(1)
    for seed in range(20):
        unrolls = taken(parts, seed)
        reward = 1e4 + 10 * torch.randn(unrolls.inputs.reward.shape, generator=generator)
        ended = torch.ones_like(unrolls.terminated)
        ended[0] = False  # one transition, which ends the episode: its target is its reward
        parts.learner.train(unrolls._replace(inputs=unrolls.inputs._replace(reward=reward), terminated=ended))
    assert popart.mean.item() == pytest.approx(1e4, abs=10)
    assert 5 < popart.unit.item() < 15
