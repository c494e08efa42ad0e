"""`seedrl check`: what it finds out about environments, models and algorithms, good and bad."""

import json
from typing import Any

import numpy as np
import pytest

from envs_server import check_env
from envs_server.examination import Finding, examine, random_action
from seedrl.commandline.main import compose
from seedrl.errors import ConfigError
from seedrl.roles.check import findings, run_check
from seedrl.specs import ArraySpec, CategoricalSpec, ContinuousSpec, EnvSpec
from tests.fakes import make_job
from tests.simulators import Counter

ALL_WELL = ["interface", "spaces", "rows", "seeding", "ends", "rewards", "speed"]


def found(kind: Any, steps: int = 150, **job: Any) -> list[Finding]:
    return list(examine(make_job(num_envs=1, env_id="own", **job), steps, [], make_env=kind))


def not_good(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.about) for finding in findings if finding.level != "ok"]


def test_good_environment_has_only_good_findings() -> None:
    findings = found(Counter)
    assert [finding.about for finding in findings] == ALL_WELL
    assert not_good(findings) == []
    [ends] = [finding.words for finding in findings if finding.about == "ends"]
    assert ends == "50 episodes ended within 150 steps, 50 terminated and 0 truncated"


@pytest.mark.parametrize(("env_id", "missing"), [("gymnasium:CartPole-v1", []), ("CartPole-v1", ["interface"])])
def test_environments_of_gymnasium_and_envpool_are_good(env_id: str, missing: list[str]) -> None:
    findings = list(examine(make_job(num_envs=1, env_id=env_id), 150, []))
    assert not_good(findings) == []
    assert [finding.about for finding in findings] == [each for each in ALL_WELL if each not in missing]


class Unseeded(Counter):
    draws = 0

    def reset(self, seed: int | None = None) -> Any:
        Unseeded.draws += 1
        return [Unseeded.draws, 0, 0], {}


class Deaf(Counter):
    def reset(self, seed: int | None = None) -> Any:
        return super().reset(seed=1)


class Endless(Counter):
    def step(self, action: Any) -> Any:
        observation, _, *_, info = super().step(action)
        return observation, 0.0, False, False, info


class Shy(Counter):
    """Ends with numbers instead of flags."""

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, int(terminated), truncated, info


@pytest.mark.parametrize(
    ("kind", "level", "about", "words"),
    [
        (Unseeded, "warning", "seeding", "two episodes of the same seed and actions differ, first in row 0"),
        (Deaf, "warning", "seeding", "different seeds give the same episode"),
        (Endless, "note", "ends", "no episode ended within 150 steps"),
        (Endless, "note", "rewards", "random actions got no reward at all"),
        (Shy, "warning", "interface", "in step: terminated should be a bool; step returned int"),
    ],
)
def test_doubtful_environment_is_named(kind: Any, level: str, about: str, words: str) -> None:
    findings = found(kind)
    assert (level, about) in not_good(findings)
    assert any(finding.about == about and words in finding.words for finding in findings)
    assert not any(finding.level == "error" for finding in findings)


class Old(Counter):
    def step(self, action: Any) -> Any:
        observation, reward, done, _, info = super().step(action)
        return observation, reward, done, info


class Nan(Counter):
    def step(self, action: Any) -> Any:
        _, *others = super().step(action)
        return [np.nan, 0, 0], *others


class Infinite(Counter):
    def step(self, action: Any) -> Any:
        observation, _, *others = super().step(action)
        return observation, np.inf, *others


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Old, "in step: step must return (observation, reward, terminated, truncated, info)"),
        (Nan, "in step: observation: expected finite numbers, saw nan"),
        (Infinite, "the reward must be finite; step returned inf"),
        (object, "object has no observation_space, which an environment needs"),
    ],
)
def test_broken_environment_is_an_error_and_nothing_follows(kind: Any, words: str) -> None:
    [*_, last] = findings = found(kind)
    assert words in last.words
    assert {(finding.level, finding.about) for finding in findings} == {("error", "interface")}


def test_check_env_prints_and_returns_the_findings_of_ones_own_program(capsys: pytest.CaptureFixture[str]) -> None:
    findings = check_env(Counter, steps=30, length=5)
    assert capsys.readouterr().out == "".join(f"{finding}\n" for finding in findings)
    assert [finding.about for finding in findings] == ALL_WELL


def test_environment_that_raises_is_an_error_with_line_and_traceback() -> None:
    [finding] = found(Counter, options={"trouble": "raise", "length": 99})
    assert finding.words.startswith("tests/simulators.py:")
    assert "in _have_trouble" in finding.traceback


def test_wrapper_that_forgets_its_spec_is_an_error() -> None:
    findings = list(examine(make_job(num_envs=1, env_id="CartPole-v1", wrappers=[f"{__name__}:Halved"]), 20, []))
    assert [(each.level, each.about) for each in findings] == [("ok", "spaces"), ("error", "rows")]
    assert "expected float32[1, 4], as the pool's spec says, saw float32[1, 2]" in findings[-1].words


def Halved(pool: Any) -> Any:
    from envs_server.pool import Wrapper

    class Half(Wrapper):
        def observation(self, observation: Any) -> Any:
            return observation[:, :2]

    return Half(pool)


def test_random_actions_are_within_bounds_and_respect_masks() -> None:
    spec = EnvSpec(
        ArraySpec((1,), "float32"),
        {"arm": ContinuousSpec((-1.0, 0.0), (1.0, float("inf")), (2,)), "leg": CategoricalSpec((2, 3), (2,))},
    )
    random = np.random.default_rng(0)
    for _ in range(50):
        action = random_action(spec, random, np.array([0, 1, 0, 0, 1]))
        assert isinstance(action, dict)
        assert action["leg"].tolist() == [[1, 2]]
        assert (action["arm"] >= [[-1, 0]]).all()
        assert action["arm"][0, 0] <= 1


# The command.


def test_check_command_prints_a_line_for_each_finding_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    run_check(compose("check", ["env.id=tests.simulators:Counter", "steps=30"]))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [["ok", about] for about in ALL_WELL]
    assert lines[-1] == "no error and no warnings found"


def test_check_command_of_what_is_broken_fails_and_gives_json(capsys: pytest.CaptureFixture[str]) -> None:
    config = compose("check", [f"env.id={__name__}:Nan", "steps=30", "json=true"])
    with pytest.raises(ConfigError, match=r"^1 error and no warnings found$"):
        run_check(config)
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert finding["level"] == "error"
    assert finding["words"].startswith("tests/test_check.py:")
    assert finding["words"].endswith(" in step: observation: expected finite numbers, saw nan")


def checked(*overrides: str) -> dict[str, Finding]:
    return {each.about: each for each in findings(compose("check", ["env.id=mock", "steps=20", *overrides]))}


SMALL = "env.options={shape: [3], dtype: float32}"


def test_check_of_a_model_and_an_algorithm_of_ones_own() -> None:
    by_name = checked(SMALL, "model.name=tests.fakes:TinyModel", "algorithm=vtrace")
    assert by_name["model"].level == "ok"
    assert by_name["algorithm"].words.startswith("vtrace has a loss of ")
    assert checked(SMALL).keys().isdisjoint({"model", "algorithm"})  # torch is not needed for built-in ones


def test_check_of_a_wrong_model_names_what_was_expected() -> None:
    by_name = checked(SMALL, "model.name=tests.test_own_models:Own", "model.options={wrong: logits}")
    assert by_name["model"].level == "error"
    assert "spec.policy_size" in by_name["model"].words


def test_check_of_environments_that_actors_bring_says_so() -> None:
    config = compose("check", ["env=own", "callbacks=[tests.no_such_module:Journal]"])
    note, callback = findings(config)
    assert (note.level, note.about) == ("note", "environment")
    assert callback.words.startswith("callbacks=tests.no_such_module:Journal: there is no module tests.no_such_module")
