"""Settings that could never work are refused before anything is started."""

import math
from typing import Any

import pytest

import seedrl.algorithms.build as algorithms
import seedrl.models.build as models
from seedrl.algorithms.settings import ALGORITHMS, DQNConfig, SACConfig
from seedrl.config import MODELS, ActorConfig, LearnerConfig
from seedrl.errors import ConfigError
from seedrl.validation import check, check_actor


def settings(**changes: Any) -> LearnerConfig:
    config = LearnerConfig()
    for key, value in changes.items():
        group, _, name = key.rpartition("__")
        setattr(getattr(config, group) if group else config, name, value)
    return config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"store__capacity": 3, "algorithm__batch_size": 4}, "store.capacity=3 could never hold"),
        ({"actors__count": 0, "actors__envs": 2048}, "actors.envs=2048 .* no actor could ever join"),
        ({"actors__count": 3, "actors__envs": 512}, "actors.count=3 × actors.envs=512 is more than"),
        ({"serving__min_rows": 2000, "serving__max_rows": 4000}, "serving.min_rows=2000 can never be reached"),
        ({"serving__min_rows": 300}, "serving.min_rows=300 must be between 1 and serving.max_rows=256"),
        ({"serving__max_wait": math.inf}, "serving.max_wait=inf must be finite"),
        ({"serving__max_wait": math.nan}, "serving.max_wait=nan must be finite"),
        ({"serving__max_silence": -1.0}, "serving.max_silence=-1.0 must not be negative"),
        ({"actors__envs": 30, "actors__groups": 4}, "actors.groups=4 must divide actors.envs=30"),
        ({"lockstep": True, "actors__count": 2}, "lockstep=true needs actors.count=1"),
        ({"lockstep": True, "actors__at_most": 2}, "lockstep=true needs one actor, not actors.at_most=2"),
        ({"actors__at_most": 129}, "actors.at_most=129 × actors.envs=8 is more than serving.max_slots=1024"),
    ],
)
def test_settings_that_would_deadlock_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    """A9: with these, actors or the learner would wait for what never comes."""
    with pytest.raises(ConfigError, match=words):
        check(settings(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model__name": "resnet"},
            "model.name=resnet is none of auto, mlp, nature, impala, grid, board, tiny, and not",
        ),
        ({"algorithm__name": "a3c"}, "algorithm.name=a3c is none of ppo, vtrace, pqn, .*, and not your.module:Class"),
        ({"listen": "10.0.0.1"}, "listen=10.0.0.1 must be HOST:PORT or unix:PATH, such as listen=10.0.0.1:50051"),
    ],
)
def test_settings_that_name_nothing_are_refused_before_anything_starts(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(settings(**changes))


REPLAY = {"algorithm__name": "dqn", "store__select": "my_selectors:Uniform"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"store__select": "fifo"}, "algorithm=dqn .without .name. also sets the store, or set store.select=uniform"),
        ({"algorithm__on_policy": True}, "algorithm.on_policy=true leaves out what older policies did"),
        ({"algorithm__dqn": DQNConfig(burn_in=128)}, "burn_in=128 must be .* less than half of .*unroll_length=256"),
        ({"algorithm__dqn": DQNConfig(burn_in=-1)}, "algorithm.dqn.burn_in=-1 must be"),
        ({"algorithm__dqn": DQNConfig(n_steps=0)}, "algorithm.dqn.n_steps=0 must be at least 1"),
        ({"algorithm__dqn": DQNConfig(eta=1.5)}, "algorithm.dqn.eta=1.5 must be between 0 and 1"),
        ({"algorithm__dqn": DQNConfig(target_period=0)}, "algorithm.dqn.target_period=0 must be at least 1"),
    ],
)
def test_settings_of_replay_that_cannot_work_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    check(settings(**REPLAY))
    with pytest.raises(ConfigError, match=words):
        check(settings(**{**REPLAY, **changes}))


SAC = {"algorithm__name": "sac", "store__select": "my_selectors:Uniform"}
SQUASHED = {"model__squash": True, "model__state_std": True}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__squash": False}, "algorithm.name=sac needs model.squash=true and .*; algorithm=sac .* sets both"),
        ({"model__state_std": False}, "algorithm.name=sac needs model.squash=true and model.state_std=true"),
        ({"model__lstm": 8}, "critics without a memory; set model.lstm=0"),
        ({"algorithm__sac": SACConfig(n_steps=0)}, "algorithm.sac.n_steps=0 must be at least 1"),
        ({"algorithm__sac": SACConfig(target_rate=0.0)}, "algorithm.sac.target_rate=0.0 must be above 0"),
        ({"algorithm__sac": SACConfig(temperature=0.0)}, "algorithm.sac.temperature=0.0 must be positive"),
    ],
)
def test_settings_of_soft_actor_critic_that_cannot_work_are_refused(changes: dict[str, Any], words: str) -> None:
    check(settings(**SAC, **SQUASHED))
    with pytest.raises(ConfigError, match=words):
        check(settings(**{**SAC, **SQUASHED, **changes}))


def test_names_that_settings_know_are_those_that_are_built() -> None:
    assert MODELS[1:] == models.BUILT_IN
    assert tuple(algorithms.BUILT_IN) == ALGORITHMS


def test_settings_at_the_edge_of_what_works_are_accepted() -> None:
    check(settings(store__capacity=32, actors__envs=1024, serving__min_rows=256))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learner": ""}, "needs the learner's address"),
        ({"learner": "foo"}, "learner=foo must be HOST:PORT or unix:PATH, such as learner=foo:50051"),
        ({"step_deadline": 0.0}, "step_deadline=0.0 must be positive"),
        ({"patience": -1.0}, "patience=-1.0 must not be negative"),
        ({"max_env_failures": -1}, "max_env_failures=-1 must not be negative"),
    ],
)
def test_settings_of_an_actor_that_cannot_work_are_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_actor(ActorConfig(**{"learner": "localhost:50051", **changes}))
