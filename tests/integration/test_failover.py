"""`seedrl run` whose learner is killed in mid-training, again and again: real processes and real signals."""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from seedrl.context import LEARNER, Context, ContextFile, State
from seedrl.v1 import inference_pb2 as pb
from seedrl.v1 import inference_pb2_grpc
from tests.integration.processes import Commands, Process, saved_steps, summary_of
from tests.integration.waiting import DEADLINE, eventually, is_listening

ACTORS = 2
SETTINGS = (
    *(f"actors.count={ACTORS}", "actors.envs=16", "algorithm.batch_size=8", "algorithm.unroll_length=10"),
    *("stop.return_mean_100=null", "stop.env_steps=1_000_000_000", "checkpoint.seconds=0.1", "max_restarts=20"),
)


class Run(NamedTuple):
    """`seedrl run` and how to look at it."""

    process: Process
    directory: Path

    @property
    def context(self) -> Context:
        return ContextFile(self.directory).read_or_new()

    @property
    def learner(self) -> int:
        """The process id of the learner that can be found in the context; 0 for none."""
        pid = self.context.members[LEARNER].pid if LEARNER in self.context.members else 0
        return pid if pid in self.process.children("learner") else 0

    def is_training(self) -> bool:
        assert self.process.is_running, self.process.err
        return bool(self.learner) and self.context.state is State.RUNNING

    def trains_on(self) -> None:
        """Waits for the next checkpoint."""
        before = saved_steps(self.directory)
        eventually(lambda: saved_steps(self.directory) > before or not self.process.is_running)
        assert self.process.is_running, self.process.err


@contextmanager
def asked(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


def streaming(channel: grpc.Channel) -> set[str]:
    """Actors that have sent something since they joined."""
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    try:
        actors = stub.Status(pb.StatusRequest(), timeout=DEADLINE).actors
    except grpc.RpcError:
        return set()
    return {actor.name for actor in actors if actor.connected_seconds - actor.silent_seconds > 0.05}


def kill_and_wait_for_its_successor(run: Run) -> float:
    """Seconds from the opening of the new learner's port until every actor streams to it."""
    address, pid = run.context.address, run.learner
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: pid not in run.process.children("learner"))
    left = saved_steps(run.directory)
    eventually(lambda: is_listening(address) or not run.process.is_running)
    opened = time.monotonic()
    with asked(address) as channel:
        eventually(lambda: len(streaming(channel)) == ACTORS or not run.process.is_running)
    took = time.monotonic() - opened
    eventually(lambda: run.is_training() and run.learner != pid)
    assert run.context.address == address
    assert f"resumed at {left:,} steps" in run.process.out  # of the newest checkpoint that the dead one left
    run.trains_on()
    return took


def health_seconds(address: str, times: int) -> list[float]:
    """How long each of many questions takes, one after the other."""
    took = []
    with asked(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ["live", "ready"] * (times // 2):
            began = time.monotonic()
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE)
            took.append(time.monotonic() - began)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    return took


def start(commands: Commands) -> Run:
    run = Run(commands.start("run", "run_dir=run", *SETTINGS), commands.directory / "run")
    eventually(lambda: run.is_training() and saved_steps(run.directory))
    return run


def ends_in_order(run: Run) -> float:
    """Seconds from SIGTERM to the end."""
    began = time.monotonic()
    run.process.signal(signal.SIGTERM)
    assert run.process.wait() == 0, run.process.err
    assert run.process.left_behind() == []
    assert summary_of(run.directory)["env_steps"] == saved_steps(run.directory)
    return time.monotonic() - began


def test_run_whose_learner_is_killed_resumes_its_actors_return_and_sigterm_still_ends_it_in_order(
    commands: Commands,
) -> None:
    """A5 (streaming within 5 s), C6 (exit 0 within 25 s), C7 (health p99 ≤ 100 ms under load), C9 (budget printed)."""
    run = start(commands)
    took = [kill_and_wait_for_its_successor(run) for _ in range(2)]
    p99 = float(np.percentile(health_seconds(run.context.address, times=300), 99))
    ended = ends_in_order(run)
    print(f"A5: all stream {max(took):.1f} s after the port opened; C7: p99 {1e3 * p99:.0f} ms; C6: {ended:.1f} s")
    assert max(took) < 5.0
    assert p99 < 0.1
    assert ended < 25.0
    assert " MiB (store " in run.process.out

    context = run.context
    assert context.state is State.DONE
    assert context.members[LEARNER].restarts == 2
    assert context.members[LEARNER].incarnation == 3
    assert [context.members[f"actor-{number}"].restarts for number in range(ACTORS)] == [0] * ACTORS
    assert [context.members[f"actor-{number}"].exit_code for number in range(ACTORS)] == [0] * ACTORS
    lines = run.process.err.splitlines()
    assert len(lines) == 2
    assert all("learner ended with code -9 (ended by SIGKILL); " in line for line in lines)
    assert all("actor-0 (16 slots)" in line and line.endswith("wait for it; restarting it") for line in lines)


def test_run_whose_learner_cannot_come_back_gives_up_with_a_reason_and_its_code(commands: Commands) -> None:
    run = Run(commands.start("run", "run_dir=run", *SETTINGS, "max_restarts=0"), commands.directory / "run")
    eventually(run.is_training)
    os.kill(run.learner, signal.SIGKILL)
    assert run.process.wait() == 128 + signal.SIGKILL
    reason = "the learner crashed 1 times within 10 minutes, max_restarts allows no more; last: ended by SIGKILL"
    assert run.process.err == f"seedrl run: {reason}\n"
    assert run.process.left_behind() == []
    assert (run.context.state, run.context.reason) == (State.FAILED, reason)
    code, out, err = commands.run("status", "run=run")
    assert code == 4
    assert "FAILED, 0:0" in out
    assert reason in out
    assert "learner, life 1, " in out
    assert "exit code -9: ended by SIGKILL" in out
    assert "run is not running, and it did not end in order" in err


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_run_whose_learner_is_killed_ten_times_loses_nothing_that_was_saved(commands: Commands) -> None:
    """A5, and the counters: each life begins where the newest checkpoint is, and never before the one before."""
    chance = random.Random(5)
    run = start(commands)
    took, saved = [], []
    for _ in range(10):
        for _ in range(chance.randint(0, 5)):
            run.trains_on()
        took.append(kill_and_wait_for_its_successor(run))
        saved.append(saved_steps(run.directory))
    ended = ends_in_order(run)
    print(f"A5: all stream {max(took):.1f} s after the port opened, at worst of ten; C6: {ended:.1f} s")
    assert max(took) < 5.0
    assert saved == sorted(saved)
    assert run.context.members[LEARNER].restarts == 10
    assert run.context.members["actor-0"].restarts == 0
