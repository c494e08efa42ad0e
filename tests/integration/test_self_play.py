"""Games over real streams and as commands: lock-step runs that repeat bit for bit, and two policies that meet."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import Commands, summary_of
from tests.integration.test_lockstep import counters, final_tensors

pytestmark = pytest.mark.long

SMALL = (
    *("display=none", "metrics=", "lockstep=true", "actors.envs=16", "algorithm.unroll_length=4"),
    *("algorithm.batch_size=8", "algorithm.minibatches=2", "algorithm.passes=1", "threads=1", "stop.env_steps=800"),
    *("exploration.epsilon=0.6", "actors.threads=4"),  # which race for the games of every step
)


def counted(run_dir: Path) -> dict[str, Any]:
    """Return the counters of a run without the verdict on learning, which depends on when it is made."""
    return {name: value for name, value in counters(run_dir).items() if name != "learning"}


@pytest.mark.parametrize("match", ["self", "uniform"])
def test_lockstep_run_of_two_players_repeats_bit_for_bit(commands: Commands, match: str) -> None:
    league = ("algorithm.on_policy=false", f"league.match={match}", "league.snapshot_updates=5", "league.snapshots=3")
    runs = [
        commands.start("run", "env=tictactoe", f"run_dir={name}", f"seed={seed}", *league, *SMALL)
        for name, seed in (("one", 3), ("again", 3), ("other", 4))
    ]
    for process in runs:
        assert process.wait(110.0) == 0, process.err
    one, again, other = (commands.directory / name for name in ("one", "again", "other"))
    assert final_tensors(one) == final_tensors(again) != final_tensors(other)
    assert counted(one) == counted(again)
    assert summary_of(one)["episodes"] > 100
    assert (summary_of(one).get("games", {}) != {}) == (match == "uniform")


def test_eval_lets_two_policies_play_and_says_who_wins(commands: Commands) -> None:
    trained = commands.start("run", "env=tictactoe", "run_dir=one", *SMALL)
    assert trained.wait(110.0) == 0, trained.err
    for opponent in ("random", "one"):
        shown = commands.start("eval", "one", f"opponent={opponent}", "episodes=50", "--json")
        assert shown.wait(110.0) == 0, shown.err
        report = json.loads(shown.out)
        assert report["opponent"] == opponent
        assert len(report["seeds"][0]["returns"]) == 50
        assert set(report["seeds"][0]["returns"]) <= {-1.0, 0.0, 1.0}
        assert sum(report["games"].values()) == pytest.approx(1.0)
        assert 2.0 < sum(report["seeds"][0]["lengths"]) / 50 < 5.0  # moves of one side
