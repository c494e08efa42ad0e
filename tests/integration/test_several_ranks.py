"""Several ranks under torchrun, as `seedrl run launch=torchrun` starts them: real processes and real signals."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from seedrl.config import SecurityConfig
from seedrl.run import checkpoint as files
from seedrl.run.context import LEARNER, Context, ContextFile, State
from seedrl.status import Status
from seedrl.wire.channel import Link, ask_status
from tests.integration.processes import Commands, Process, checkpoints_of, saved_steps, summary_of
from tests.integration.waiting import eventually, free_address

RANKS = 2
LONG = 150.0  # seconds to wait for processes that import torch on a busy machine
SETTINGS = (
    *("actors.envs=16", "algorithm.batch_size=4", "algorithm.unroll_length=10", "threads=1", "metrics="),
    *("stop.return_mean_100=null", "checkpoint.seconds=0.2", "display=plain"),
)
ALONE = ("launch=local", "ranks.count=1", "ranks.separate=false", "actors.count=1")
ON_TORCHRUN = ("launch=torchrun", f"ranks.count={RANKS}", f"actors.count={RANKS}", *SETTINGS)
FOR_EVER = "stop.env_steps=1_000_000_000"


class Run(NamedTuple):
    process: Process
    directory: Path

    def context(self, rank: int = 0) -> Context:
        return ContextFile(self.directory / f"ranks/{rank}" if rank else self.directory).read_or_new()

    def pids(self) -> list[int]:
        """Return the process ids that ranks have written to their contexts."""
        members = [self.context(rank).members.get(LEARNER) for rank in range(RANKS)]
        return [member.pid for member in members if member is not None]

    def is_training(self) -> bool:
        assert self.process.is_running, self.process.out + self.process.err
        return all(self.context(rank).state is State.RUNNING for rank in range(RANKS))

    def status(self, rank: int) -> Status:
        return ask_status(Link(self.context(rank).address, SecurityConfig()), 10.0)

    def trains_on(self) -> None:
        before = saved_steps(self.directory)
        eventually(lambda: saved_steps(self.directory) > before or not self.process.is_running, LONG)
        assert self.process.is_running, self.process.out + self.process.err

    def streaming(self) -> list[str]:
        """Return the actors with open sessions."""
        return [
            name for rank in range(RANKS) for name, member in self.context(rank).members.items() if member.streams_to
        ]


def start(commands: Commands, *settings: str) -> Run:
    process = commands.start("run", "run_dir=run", *ON_TORCHRUN, *settings)
    run = Run(process, commands.directory / "run")
    eventually(lambda: run.is_training() and saved_steps(run.directory), LONG)
    return run


def rows_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.cluster
@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", range(RANKS))
def test_run_whose_rank_is_killed_resumes_from_the_checkpoint_with_all_ranks_and_actors(
    victim: int, commands: Commands
) -> None:
    run = start(commands, FOR_EVER)
    eventually(lambda: sorted(run.streaming()) == ["actor-0", "actor-1"], LONG)
    before = run.pids()
    told = [run.status(rank) for rank in range(RANKS)]
    assert [(each.rank, each.ranks) for each in told] == [(0, RANKS), (1, RANKS)]
    code, out, _ = commands.run("status", f"learner={run.context(1).address}")
    assert (code, f"learner rank 1/{RANKS} on " in out) == (0, True)

    began = time.monotonic()
    os.kill(before[victim], signal.SIGKILL)
    eventually(lambda: len(run.pids()) == RANKS and not set(run.pids()) & set(before) and gone(before), LONG)
    left = saved_steps(run.directory)
    eventually(lambda: run.is_training() and sorted(run.streaming()) == ["actor-0", "actor-1"], LONG)
    took = time.monotonic() - began
    assert f"resumed at {left:,} steps" in run.process.out
    run.trains_on()
    print(f"from the death of rank {victim} until all train and all actors stream: {took:.1f} s")

    now = run.pids()
    run.process.signal(signal.SIGTERM)
    assert run.process.wait(LONG) == 0, run.process.out + run.process.err
    assert gone(now)
    first, second = (summary_of(run.directory / where) for where in ("", "ranks/1"))
    assert first["reason"].endswith("Interrupted by SIGTERM")
    assert first["updates"] == second["updates"] > 0  # policy versions are numbers of updates
    assert first["env_steps"] == saved_steps(run.directory) > second["env_steps"] > 0
    assert not (run.directory / "ranks/1/checkpoints").exists()
    assert {row["rank"] for row in rows_of(run.directory)} == {0}
    assert {row["rank"] for row in rows_of(run.directory / "ranks/1")} == {1}
    assert run.context().state is State.INTERRUPTED


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_run_stops_with_all_ranks_when_one_of_them_is_asked_to(commands: Commands) -> None:
    run = start(commands, FOR_EVER)
    pids = run.pids()
    os.kill(pids[1], signal.SIGTERM)
    assert run.process.wait(LONG) == 0, run.process.err
    assert gone(pids)
    assert summary_of(run.directory)["reason"] == "rank 1: Interrupted by SIGTERM"
    assert summary_of(run.directory / "ranks/1")["reason"] == "Interrupted by SIGTERM"


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_run_resumes_with_any_number_of_ranks(commands: Commands) -> None:
    """2 → 1 → 2: weights, optimiser and counters continue, whichever rank counted."""
    directory = commands.directory / "run"
    seen = []
    for goal, engine in ((4_000, ON_TORCHRUN), (8_000, (*ALONE, *SETTINGS)), (12_000, ON_TORCHRUN)):
        process = commands.start("run", "run_dir=run", *engine, f"stop.env_steps={goal}")
        assert process.wait(LONG) == 0, process.out + process.err
        summary = summary_of(directory)
        assert goal <= summary["env_steps"] < goal + 4_000
        if seen:
            assert f"resumed at {seen[-1][0]:,} steps, {seen[-1][1]:,} updates" in process.out
        state = files.load(checkpoints_of(directory)[-1]).state
        assert state["serving"]["env_steps"] == summary["env_steps"]
        assert state["learning"]["updates"] == summary["updates"]
        trained, per_update = state["learning"]["unrolls_trained"], 4
        assert trained >= per_update * summary["updates"]
        seen.append((summary["env_steps"], summary["updates"], summary["episodes"], trained))
    assert seen == sorted(seen)
    (_, first, _, trained), (_, alone, _, trained_alone), (_, last, _, trained_last) = seen
    assert 4 * first <= trained <= RANKS * 4 * first  # a rank whose actor has not come yet has no part in an update
    assert trained_alone - trained == 4 * (alone - first)
    assert 4 * (last - alone) <= trained_last - trained_alone <= RANKS * 4 * (last - alone)


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_run_that_serves_and_trains_apart_ends_cleanly_and_resumes_in_one_process(commands: Commands) -> None:
    directory = commands.directory / "run"
    apart = ("launch=torchrun", "ranks.count=2", "ranks.separate=true", "actors.count=2", *SETTINGS)
    seen = []
    for goal, engine in ((4_000, apart), (8_000, apart), (12_000, (*ALONE, *SETTINGS))):
        process = commands.start("run", "run_dir=run", *engine, f"stop.env_steps={goal}")
        assert process.wait(LONG) == 0, process.out + process.err
        if seen:
            assert f"resumed at {seen[-1][0]:,} steps, {seen[-1][1]:,} updates" in process.out
        summary, saved = summary_of(directory), files.load(checkpoints_of(directory)[-1])
        assert summary["env_steps"] == saved.state["serving"]["env_steps"] >= goal
        assert saved.state["learning"]["unrolls_trained"] == 4 * summary["updates"]
        assert sum(saved.state["learning"]["publish_lag_seconds"]["counts"]) > 0
        assert any(name.startswith("optimizer/") for name in saved.tensors)
        seen.append((summary["env_steps"], summary["updates"]))
    assert seen == sorted(seen)
    assert 0 < summary["policy_lag_mean"] < 20


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_run_goes_on_training_while_the_actors_of_one_rank_are_paused(commands: Commands) -> None:
    run = start(commands, FOR_EVER)
    eventually(lambda: sorted(run.streaming()) == ["actor-0", "actor-1"], LONG)
    for command in ("pause", "resume"):
        code, _, err = commands.run("control", command, f"learner={run.context(1).address}")
        assert code == 0, err
        run.trains_on()
        run.trains_on()  # the first of them may have been made before
    run.process.signal(signal.SIGTERM)
    assert run.process.wait(LONG) == 0, run.process.out + run.process.err


@pytest.mark.cluster
@pytest.mark.timeout(400)
@pytest.mark.parametrize("separate", ["true", "false"])
def test_ranks_that_are_interrupted_before_an_actor_comes_end_cleanly(separate: str, commands: Commands) -> None:
    settings = ("run_dir=run", "listen=127.0.0.1:0", f"ranks.count={RANKS}", f"ranks.separate={separate}", *SETTINGS)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_address().rpartition(":")[2], "WORLD_SIZE": str(RANKS)}
    first, second = (
        commands.start("learner", *settings, RANK=str(rank), LOCAL_RANK=str(rank), **meeting) for rank in range(RANKS)
    )
    eventually(lambda: "waiting for actors" in first.out or not first.is_running, LONG)
    first.signal(signal.SIGTERM)
    assert first.wait(LONG) == 0, first.out + first.err
    assert second.wait(LONG) == 0, second.out + second.err


@pytest.mark.cluster
def test_run_whose_ranks_would_only_fail_again_ends_with_their_code_and_reason(commands: Commands) -> None:
    process = commands.start("run", "run_dir=run", *ON_TORCHRUN, FOR_EVER, "model=nature")
    assert process.wait(LONG) == 2, process.out + process.err
    assert "model.name=nature needs images" in process.err
    assert "attempts" not in process.err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["ranks.count=2"], "launch=torchrun"),
        (["ranks.count=2", "ranks.separate=true"], "launch=torchrun"),
        (["ranks.count=2", "launch=torchrun", "actors.count=1"], "actors.count=1 leaves some of ranks.count=2"),
    ],
)
def test_run_with_ranks_that_are_not_started_or_have_no_actors_is_refused(
    settings: list[str], words: str, commands: Commands
) -> None:
    code, _, err = commands.run("run", "run_dir=run", *settings)
    assert code == 2
    assert words in err


def test_learner_with_another_number_of_ranks_than_were_started_is_refused(commands: Commands) -> None:
    code, _, err = commands.run("learner", "ranks.count=3", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert code == 2
    assert "seedrl learner rank 1/2 on" in err
    assert "ranks.count=3, and 2 were started" in err


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_actors_that_all_come_to_rank_0_are_shared_out_and_move_when_it_is_emptied(commands: Commands) -> None:
    """Ranks send each other the loads of their endpoints in rounds; actors know only rank 0's address."""
    run = start(commands, FOR_EVER, "listen=127.0.0.1:0")
    home = run.status(0).address

    def guests(rank: int) -> set[str]:
        return {name for name, member in run.context(rank).members.items() if member.streams_to and "guest" in name}

    everybody = {f"guest-{number}" for number in range(4)}
    for name in sorted(everybody):
        commands.start("actor", f"learner={home}", f"name={name}")
        eventually(lambda name=name: name in guests(0) | guests(1), LONG)
    assert [len(guests(rank)) for rank in range(RANKS)] == [2, 2]
    code, _, err = commands.run("control", "move", f"learner={home}")
    assert code == 0, err
    eventually(lambda: guests(1) == everybody and not run.status(0).actors, LONG)
    run.trains_on()  # no rank waits for one without actors
    code, _, err = commands.run("control", "open", f"learner={home}")
    assert code == 0, err
    eventually(lambda: run.status(0).actors, LONG)  # some are redirected back
    run.trains_on()
