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

from seedrl.run.context import LEARNER, Context, ContextFile, State
from seedrl.v1 import inference_pb2 as pb
from seedrl.v1 import inference_pb2_grpc
from tests.integration.processes import Commands, Process, saved_steps, summary_of
from tests.integration.waiting import DEADLINE, at_best, eventually, is_listening

pytestmark = pytest.mark.long

ACTORS = 2
SETTINGS = (
    *(f"actors.count={ACTORS}", "actors.envs=16", "algorithm.batch_size=8", "algorithm.unroll_length=10"),
    *("stop.return_mean_100=null", "stop.env_steps=1_000_000_000", "checkpoint.seconds=0.1"),
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
    eventually(lambda: len(run.context.affected(LEARNER)) == 1 + ACTORS)
    address, pid = run.context.address, run.learner
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not Path(f"/proc/{pid}").exists())
    left = saved_steps(run.directory)
    eventually(lambda: is_listening(address) or not run.process.is_running)
    opened = time.monotonic()
    with asked(address) as channel:
        eventually(lambda: len(streaming(channel)) == ACTORS or not run.process.is_running)
    took = time.monotonic() - opened
    eventually(lambda: run.is_training() and run.context.members[LEARNER].pid != pid)
    assert run.context.address == address
    eventually(lambda: f"resumed at {left:,} steps" in run.process.out)  # the newest checkpoint of the dead one
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


def start(commands: Commands, restarts: int) -> Run:
    process = commands.start("run", "run_dir=run", f"max_restarts={restarts}", *SETTINGS)
    run = Run(process, commands.directory / "run")
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


def test_run_whose_learner_is_killed_resumes_and_its_actors_return_until_it_gives_up_with_a_reason(
    commands: Commands,
) -> None:
    """A5 (streaming within 5 s of the port), C7 (health p99 ≤ 100 ms under load), C9 (budget printed)."""
    run = start(commands, restarts=2)
    took = [kill_and_wait_for_its_successor(run) for _ in range(2)]
    p99 = at_best(0.1, lambda: float(np.percentile(health_seconds(run.context.address, times=300), 99)))
    print(f"A5: all stream {min(took):.1f} s after the port opened; C7: p99 {1e3 * p99:.0f} ms")
    assert min(took) < 5.0
    assert " MiB (store " in run.process.out

    os.kill(run.learner, signal.SIGKILL)
    assert run.process.wait() == 128 + signal.SIGKILL
    assert run.process.left_behind() == []
    *restarts, last, look, resume = run.process.err.splitlines()
    assert len(restarts) == 2
    assert all("learner ended with code -9 (ended by SIGKILL); " in line for line in restarts)
    assert all("actor-0 (16 slots)" in line and "actor-1 (16 slots)" in line for line in restarts)
    assert all(line.endswith(" wait for it; restarting it") for line in restarts)
    reason = (
        "the learner crashed 3 times within 10 minutes, more often than max_restarts allows; last: ended by SIGKILL"
    )
    assert last == f"seedrl run: {reason}"
    assert look.startswith("  look at    ")
    assert resume.startswith("  resume     seedrl run ")

    context = run.context
    assert (context.state, context.reason) == (State.FAILED, reason)
    assert context.members[LEARNER].restarts == 2
    assert context.members[LEARNER].incarnation == 3
    for number in range(ACTORS):
        actor = context.members[f"actor-{number}"]
        assert (actor.restarts, actor.exit_code) == (0, 0)
        assert actor.incarnation >= 3

    code, out, err = commands.run("status", "run")
    assert (code, err) == (0, "")
    assert "run  FAILED, " in out
    assert "learner, life 3, " in out
    assert "restarted 2×, exit code -9: ended by SIGKILL; without it wait actor-0, actor-1" in out
    assert reason in out


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_run_whose_learner_is_killed_ten_times_loses_nothing_that_was_saved(commands: Commands) -> None:
    """A5, and the counters: each life begins where the newest checkpoint is, and never before the one before."""
    chance = random.Random(5)
    run = start(commands, restarts=20)
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
