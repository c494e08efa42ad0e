"""Settings that follow from the spaces: what is open is resolved by kind, what is given stays."""

from collections.abc import Callable

import pytest

from seedrl.algorithms.neutral import resolve
from seedrl.config import LearnerConfig
from seedrl.specs import ArraySpec, ContinuousSpec, EnvSpec
from tests.fakes import make_spec

VECTOR, IMAGE = make_spec((4,)), make_spec((1, 84, 84), "uint8")
CONTINUOUS = EnvSpec(ArraySpec((4,), "float32"), ContinuousSpec((-1.0,), (1.0,), (1,)))


def resolved(spec: EnvSpec, name: str = "ppo", change: Callable[[LearnerConfig], None] = lambda config: None) -> tuple:
    config = LearnerConfig()
    config.algorithm.name = name
    change(config)
    algorithm = resolve(config, spec).algorithm
    return algorithm.passes, algorithm.minibatches, algorithm.entropy_cost, algorithm.on_policy


@pytest.mark.parametrize(
    ("spec", "name", "expected"),
    [
        (VECTOR, "ppo", (10, 32, 0.01, True)),
        (CONTINUOUS, "ppo", (10, 32, 0.0, True)),
        (IMAGE, "ppo", (2, 8, 0.01, False)),
        (VECTOR, "vtrace", (2, 4, 0.01, False)),
        (VECTOR, "mine:Own", (1, 1, 0.01, False)),
    ],
    ids=["choices", "continuous", "image", "vtrace", "own"],
)
def test_open_settings_follow_from_the_kind_of_spaces(spec: EnvSpec, name: str, expected: tuple) -> None:
    assert resolved(spec, name) == expected


def test_given_settings_stay() -> None:
    def give(config: LearnerConfig) -> None:
        algorithm = config.algorithm
        algorithm.passes, algorithm.minibatches, algorithm.entropy_cost, algorithm.on_policy = 3, 5, 0.2, False

    assert resolved(VECTOR, change=give) == (3, 5, 0.2, False)


@pytest.mark.parametrize(
    ("setting", "value"), [("envs", 24), ("count", 2), ("at_most", 3), ("evaluation", 0.25), ("count", 0)]
)
def test_run_is_not_on_policy_by_itself_if_train_batches_cannot_hold_all_environments_alike(
    setting: str, value: float
) -> None:
    assert resolved(VECTOR, change=lambda config: setattr(config.actors, setting, value))[3] is False


def test_run_with_fewer_environments_is_on_policy_with_several_unrolls_of_each() -> None:
    assert resolved(VECTOR, change=lambda config: setattr(config.actors, "envs", 4))[3] is True


def test_model_with_memory_is_trained_on_several_unrolls_at_a_time() -> None:
    assert resolved(VECTOR, change=lambda config: setattr(config.model, "lstm", 64)) == (10, 8, 0.01, True)
