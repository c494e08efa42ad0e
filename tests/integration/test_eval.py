"""`seedrl eval`: exactly so many episodes, through a real stream, without favouring the short ones."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seedrl.config import EvalConfig, LearnerConfig
from seedrl.errors import ConfigError, SeedrlError
from seedrl.roles.evaluate import Quota, Score, evaluate
from seedrl.run.snapshot import chosen_checkpoint
from seedrl.serving.slots import FinishedEpisodes
from seedrl.validation import check_eval
from tests.chaos.counting import WRAPPER, CountingPool, mock_options
from tests.fakes import make_job
from tests.integration.processes import Commands
from tests.integration.trained import checkpoint_of, make_run

# Which episodes count.


@given(st.integers(1, 40), st.integers(1, 8), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_quota_takes_the_first_episodes_of_every_slot_whoever_is_fast(episodes: int, slots: int, random: Any) -> None:
    quota = Quota(episodes, slots)
    assert sum(quota.wanted) == episodes
    assert max(quota.wanted) - min(quota.wanted) <= 1
    finished = dict.fromkeys(range(slots), 0)
    while not quota.is_full.is_set():
        slot = min(random.randrange(slots), random.randrange(slots))  # the first slots are faster
        finished[slot] += 1
        number = 1000 * slot + finished[slot]
        quota.add(FinishedEpisodes(np.array([slot]), np.array([float(number)]), np.array([number])))
    expected = [1000 * slot + at for slot in range(slots) for at in range(1, quota.wanted[slot] + 1)]
    assert quota.returns == quota.lengths == expected
    assert quota.count == episodes


def test_quota_is_not_biased_towards_short_episodes_as_the_first_to_finish_are() -> None:
    """Episodes of 1 or 99 steps, equally likely; all environments step at the same pace."""
    random, kept, first = np.random.default_rng(3), [], []
    for _ in range(300):
        lengths = random.choice([1, 99], (10, 20))
        ends = lengths.cumsum(axis=1)
        quota = Quota(20, 10)
        for slot, number in sorted(np.ndindex(*lengths.shape), key=lambda at: ends[at]):
            length = int(lengths[slot, number])
            quota.add(FinishedEpisodes(np.array([slot]), np.array([0.0]), np.array([length])))
        kept += quota.lengths
        first += sorted(zip(ends.reshape(-1), lengths.reshape(-1), strict=True))[:20]
    assert abs(np.mean(kept) - 50) < 3
    assert np.mean([length for _, length in first]) < 40


def test_score_has_mean_median_and_interquartile_mean_with_its_interval() -> None:
    score = Score.of([0.0] * 5 + [10.0] * 10 + [100.0] * 5)
    assert (score.mean, score.median, score.iqm) == (30.0, 10.0, 10.0)
    assert score.iqm_low <= 10.0 <= score.iqm_high
    assert (score.least, score.most, score.episodes) == (0.0, 100.0, 20)


@pytest.mark.parametrize("wrong", [{"episodes": 0}, {"seeds": 0}, {"actors": 3, "episodes": 2}, {"envs": -1}])
def test_check_eval_refuses_what_cannot_work(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        check_eval(EvalConfig(run="x", **wrong))


# Through a real stream.


def counting(config: LearnerConfig) -> None:
    config.env.id, config.env.wrappers = "mock", [WRAPPER]
    config.env.options = mock_options(longest=30)
    config.model.name = "tests.chaos.model:CountingModel"
    config.model.options = {"violations": str(Path(config.run_dir) / "violations")}
    config.serving.max_observation = math.inf  # signatures are any integers
    # What follows concerns training only, and an evaluation must not care.
    config.actors.envs, config.actors.evaluation, config.actors.at_most = 8, 0.5, 4
    config.ranks.count, config.ranks.advertise = 2, "10.0.0.1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The run of a policy that does what counting environments want; they end their actor if one action is wrong."""
    spec = CountingPool(make_job()).spec
    weights = {"model/value.weight": torch.zeros(1, 1), "model/value.bias": torch.zeros(1)}
    return make_run(tmp_path / "run", checkpoint_of(weights, spec, updates=3), change=counting)


@pytest.mark.parametrize(("episodes", "actors"), [(3, 1), (21, 2)])
def test_evaluate_plays_exactly_so_many_episodes_and_changes_nothing(run: Path, episodes: int, actors: int) -> None:
    config = EvalConfig(run=str(run), episodes=episodes, actors=actors, threads=1)
    seen: list[int] = []
    before = sorted(path.name for path in run.iterdir())
    found = evaluate(
        config, chosen_checkpoint(run, "newest", print), seed=5, show=lambda quota: seen.append(quota.count)
    )
    assert len(found.returns) == len(found.lengths) == episodes
    assert found.returns == found.lengths  # a reward for every step
    assert all(1 <= length <= 30 for length in found.lengths)
    assert found.lost_sessions == 0
    assert seen == sorted(seen)
    assert sorted(path.name for path in run.iterdir()) == before


def test_evaluate_with_options_the_environment_refuses_says_what_the_actor_said(run: Path) -> None:
    config = EvalConfig(run=str(run), episodes=2, threads=1, options={"bogus": 1})
    with pytest.raises(SeedrlError, match=r"an actor ended with code 2: .*bogus"):
        evaluate(config, chosen_checkpoint(run, "newest", print), seed=5)


@pytest.mark.long
def test_eval_prints_json_for_each_seed_and_writes_it_into_the_run_directory(run: Path, commands: Commands) -> None:
    code, out, err = commands.run("eval", f"run={run}", "episodes=8", "seeds=2", "threads=1", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert [each["seed"] for each in report["seeds"]] == [1, 2]
    assert [len(each["returns"]) for each in report["seeds"]] == [8, 8]
    assert report["seeds"][0]["returns"] != report["seeds"][1]["returns"]
    assert report["score"]["episodes"] == 16
    assert (report["env"], report["env_steps"], report["greedy"]) == ("mock", 300, True)
    (written,) = (run / "eval").iterdir()
    assert json.loads(written.read_text()) == report
    assert "seed 2: mean" in err
