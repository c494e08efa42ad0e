"""Simulations with several players over real streams: a lock-step run of two players repeats bit for bit."""

import pytest

from tests.integration.processes import Commands, summary_of
from tests.integration.test_lockstep import counters, final_tensors

pytestmark = pytest.mark.long

SMALL = (
    *("display=none", "metrics=", "lockstep=true", "actors.envs=8", "algorithm.unroll_length=4"),
    *("algorithm.batch_size=8", "algorithm.minibatches=2", "algorithm.passes=1", "threads=1", "stop.env_steps=800"),
)


def test_lockstep_run_of_two_players_repeats_bit_for_bit(commands: Commands) -> None:
    runs = [
        commands.start("run", "env=tictactoe", f"run_dir={name}", f"seed={seed}", *SMALL)
        for name, seed in (("one", 3), ("again", 3), ("other", 4))
    ]
    for process in runs:
        assert process.wait(110.0) == 0, process.err
    one, again, other = (commands.directory / name for name in ("one", "again", "other"))
    assert final_tensors(one) == final_tensors(again) != final_tensors(other)
    assert counters(one) == counters(again)
    assert summary_of(one)["episodes"] > 100
