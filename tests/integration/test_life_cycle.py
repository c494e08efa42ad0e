"""From ready to gone: health, full disks, divergence, restarts. Learners and actors in threads."""

import contextlib
import itertools
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import Tensor

from seedrl.errors import ConfigError, Diverged, RunDirectoryError, ThreadDied
from seedrl.roles.learner import LearnerProcess
from seedrl.run import checkpoint as files
from seedrl.run.context import LEARNER, ContextFile, State
from seedrl.types import ModelInput, ModelOutput
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.support import (
    IdleLearnerService,
    OracleModel,
    RunningActor,
    RunningLearner,
    Wire,
    fill,
    tiny_config,
)
from tests.integration.waiting import DEADLINE, at_best, eventually, free_address


class Health:
    """Asks a learner's port how it is."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = health_pb2_grpc.HealthStub(self._channel)

    def __enter__(self) -> "Health":
        return self

    def __exit__(self, *_: Any) -> None:
        self._channel.close()

    def is_serving(self, service: str) -> bool:
        """False also if nobody answers."""
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = self._stub.Check(request, timeout=DEADLINE)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def page(address: str, path: str) -> int:
    """The HTTP status of a page; 0 if nobody answers."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=DEADLINE) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def context_of(learner: RunningLearner) -> ContextFile:
    return ContextFile(learner.service.run_directory.path)


def trained(learner: RunningLearner, updates: int = 1) -> None:
    """Waits for so many more updates."""
    goal = learner.service.learning.updates + updates
    eventually(lambda: learner.service.learning.updates >= goal or learner.ended())


# Ready, live, draining.


def test_health_before_the_first_actor_is_live_and_not_ready(start_learner: StartLearner) -> None:
    """C7."""
    learner = start_learner()
    with Health(learner.address) as health:
        eventually(lambda: health.is_serving("live"))
        assert not health.is_serving("ready")
    file = context_of(learner)
    assert eventually(lambda: file.path.exists() and file.read()).state is State.INIT


class ColdService(LearnerProcess):
    """Notes how ready it was while it warmed up."""

    def _build(self, spec: Any) -> None:
        super()._build(spec)
        warm_up = self.inference._inference.warm_up

        def noted(rows: int) -> None:
            warm_up(rows)
            self.was_ready = self.monitor.is_ready

        self.inference._inference.warm_up = noted  # type: ignore[method-assign]


def test_health_is_ready_only_after_restoring_and_warming_up(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    """C7."""
    learner = start_learner(ColdService)
    start_actor(learner.address)
    with Health(learner.address) as health:
        eventually(lambda: health.is_serving("ready"))
    assert learner.service.was_ready is False
    assert learner.service.serving.rows_dropped == {"session_ended": 0, "partial_unroll": 0}
    assert page(learner.service.monitor.address, "/readyz") == 200


def test_health_of_a_learner_that_stops_is_not_ready_within_a_tenth_of_a_second(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    """C6: not ready within 100 ms, by gRPC and by HTTP, measured from the moment it is asked to stop."""
    took = at_best(0.1, lambda: seconds_until_not_ready(start_learner, start_actor))
    print(f"C6: not ready after {1e3 * took:.0f} ms")


def seconds_until_not_ready(start_learner: StartLearner, start_actor: StartActor) -> float:
    """The longer time of gRPC and HTTP."""
    learner = start_learner()
    actor = start_actor(learner.address)
    pages = eventually(lambda: learner.service.monitor.address)  # opened after the port
    with Health(learner.address) as health:
        eventually(lambda: health.is_serving("ready") and page(pages, "/readyz") == 200)
        asked = time.monotonic()
        learner.service.stop.ask("interrupted", "closing time")
        eventually(lambda: not health.is_serving("ready"))
        took = time.monotonic() - asked
        eventually(lambda: page(pages, "/readyz") != 200)
        took_page = time.monotonic() - asked
    learner.join()
    actor.stop()
    context = context_of(learner).read()
    assert (context.state, context.reason) == (State.INTERRUPTED, "closing time")
    return max(took, took_page / 2)  # the page was asked for after the other one


def test_health_of_a_learner_whose_batches_stand_still_while_rows_wait_is_not_live(
    start_learner: StartLearner, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: it serves its port and its pages as ever; only progress tells."""
    monkeypatch.setattr("seedrl.monitoring.life.WEDGED_SECONDS", 0.5)
    learner = start_learner(IdleLearnerService)
    start_actor(learner.address)
    with Health(learner.address) as health:
        eventually(lambda: not health.is_serving("live"))
        assert health.is_serving("ready")
    assert page(learner.service.monitor.address, "/healthz") == 503


def test_health_of_an_idle_learner_stays_live(
    start_learner: StartLearner, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C7: nobody waits for a batch, so none is missing."""
    monkeypatch.setattr("seedrl.monitoring.life.WEDGED_SECONDS", 0.5)
    learner = start_learner()
    actor = start_actor(learner.address)
    trained(learner)
    actor.stop()
    eventually(lambda: not learner.service.inference.sessions.open)
    rows = learner.service.serving.rows
    waited = itertools.count()
    eventually(lambda: next(waited) > 100)  # a second or so
    assert learner.service.monitor.is_alive
    assert learner.service.serving.rows == rows


def test_context_follows_a_learner_from_init_to_done(start_learner: StartLearner, start_actor: StartActor) -> None:
    learner = start_learner(checkpoint__seconds=0.0)
    file = context_of(learner)
    assert eventually(lambda: file.path.exists() and file.read()).state is State.INIT
    actor = start_actor(learner.address, name="left")
    eventually(lambda: file.read().state is State.RUNNING and file.read().members.get("left"))
    running = file.read()
    assert running.address == learner.address
    assert [str(member) for member in running.affected(LEARNER)] == [LEARNER, "left (4 slots)"]
    assert running.members["left"].is_leased(running.written)
    learner.stop(status="done")
    actor.join()  # C6: after training ends, actors end by themselves
    done = file.read()
    assert done.state is State.DONE
    assert done.counters["updates"] == learner.service.learning.updates
    assert done.checkpoint == files.found(learner.service.run_directory.checkpoints)[-1].name
    assert done.affected(LEARNER) == [done.members[LEARNER]]


# A second learner.


@pytest.fixture
def unix_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)  # such paths must be short
    return "unix:learner.sock"


def refused_second_learner(tmp_path: Path, address: str) -> float:
    """Seconds that it took."""
    began = time.monotonic()
    with pytest.raises(ConfigError, match=f"cannot listen on {address}"):
        LearnerProcess(tiny_config(str(tmp_path / "second"), address)).run()
    return time.monotonic() - began


def test_learners_of_a_run_without_a_newer_checkpoint_seed_their_environments_differently(
    start_learner: StartLearner,
) -> None:
    """A crash must not make the run train on the very episodes that it has already seen."""
    seeds = []
    for _ in range(3):
        learner = start_learner()
        seeds += [learner.service.inference.sessions.job_seed(session) for session in (1, 2)]
        learner.service.stop.ask("interrupted", "the test is over")
        learner.join(DEADLINE)
    assert len(set(seeds)) == 6


def test_second_learner_on_a_port_is_refused_within_a_second(start_learner: StartLearner, tmp_path: Path) -> None:
    """C11."""
    address = start_learner().address
    took = at_best(1.0, lambda: refused_second_learner(tmp_path, address))
    print(f"C11: refused after {took:.2f} s")


def test_second_learner_on_a_unix_socket_is_refused_and_the_first_goes_on(
    start_learner: StartLearner, start_actor: StartActor, tmp_path: Path, unix_address: str
) -> None:
    """C11: gRPC itself would take the file away from the first one."""
    first = start_learner(listen=unix_address)
    at_best(1.0, lambda: refused_second_learner(tmp_path, unix_address))
    start_actor(unix_address)
    trained(first)


# A full disk.


def test_learner_on_a_full_disk_trains_on_with_its_old_checkpoint_and_saves_again_when_there_is_room(
    start_learner: StartLearner, start_actor: StartActor, small_disk: Path
) -> None:
    """C3."""
    learner = start_learner(run_dir=str(small_disk / "run"), checkpoint__seconds=0.0)
    start_actor(learner.address)
    learning, directory = learner.service.learning, learner.service.run_directory.checkpoints
    eventually(lambda: files.found(directory))
    fill(small_disk / "ballast")
    eventually(lambda: learning.checkpoints_failed > 1)
    kept = files.found(directory)
    trained(learner, updates=20)
    assert not learner.ended()
    assert files.found(directory) == kept
    assert files.load_newest(directory, pytest.fail) is not None
    failed = learning.checkpoints_failed
    (small_disk / "ballast").unlink()
    eventually(lambda: files.found(directory) != kept)
    learner.stop()
    print(f"C3: {failed} checkpoints failed on a full disk, training went on")
    assert [path.name for path in directory.iterdir() if path.name.startswith(".")] == []
    assert files.load_newest(directory, pytest.fail) is not None
    assert context_of(learner).read().state is State.INTERRUPTED


# A failure while it stops.


def test_learner_whose_last_checkpoint_cannot_be_written_fails(
    start_learner: StartLearner, start_actor: StartActor, tmp_path: Path
) -> None:
    learner = start_learner(run_dir=str(tmp_path / "run"), checkpoint__seconds=1e9)
    start_actor(learner.address)
    trained(learner, updates=2)
    (tmp_path / "run/checkpoints").write_text("a file where the directory of checkpoints should be")
    learner.service.stop.ask("interrupted", "the test is over")
    with pytest.raises(RunDirectoryError, match="the last checkpoint could not be written"):
        learner.join()
    assert context_of(learner).read().state is State.FAILED


def test_learner_whose_thread_dies_after_it_was_asked_to_stop_fails(
    start_learner: StartLearner, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = start_learner()
    start_actor(learner.address)
    trained(learner, updates=2)

    def stopping(*_: Any) -> None:
        learner.service.thread_died(ArithmeticError("no such luck"))

    monkeypatch.setattr(learner.service, "_save_last", stopping)
    learner.service.stop.ask("interrupted", "the test is over")
    with pytest.raises(ThreadDied, match="no such luck"):
        learner.join()
    assert context_of(learner).read().state is State.FAILED


# Updates that are not finite.


class PoisonedModel(OracleModel):
    """Trains well until it is poisoned."""

    is_poisoned = False

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        output, core_state = super().forward(inputs, core_state)
        if PoisonedModel.is_poisoned and torch.is_grad_enabled():
            output = output._replace(value=output.value * torch.nan)
        return output, core_state


def test_learner_that_diverges_ends_with_a_code_of_its_own_and_the_next_goes_on_from_the_last_good_checkpoint(
    start_learner: StartLearner, start_actor: StartActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B3."""
    monkeypatch.setattr(PoisonedModel, "is_poisoned", False)
    settings: dict[str, Any] = {"model__name": f"{__name__}:PoisonedModel", "checkpoint__seconds": 0.0}
    learner = start_learner(**settings)
    actor = start_actor(learner.address)
    directory = learner.service.run_directory.checkpoints
    eventually(lambda: len(files.found(directory)) > 1)
    learner.service.serving.sessions_evicted["invalid_message"] += 2
    PoisonedModel.is_poisoned = True
    with pytest.raises(Diverged, match="of 10 updates in a row was not finite; the last good checkpoint is") as caught:
        learner.join()
    assert caught.value.exit_code == 8
    assert "; 2 sessions were ended for invalid messages" in str(caught.value)
    assert learner.service.learning.skipped_updates == 10
    newest = files.load_newest(directory, pytest.fail)
    assert newest is not None
    assert all(tensor.isfinite().all() for tensor in newest.tensors.values())
    assert newest.state["learning"]["skipped_updates"] == 0
    context = context_of(learner).read()
    assert context.state is State.FAILED
    assert "not finite" in context.reason
    assert context.has_progressed  # so that a supervisor tries again

    PoisonedModel.is_poisoned = False
    again = start_learner(listen=learner.address, **settings)
    trained(again, updates=5)
    assert again.service.learning.updates > newest.state["learning"]["updates"]
    assert again.service.learning.skipped_updates == 0
    assert context_of(again).read().members[LEARNER].incarnation == 2
    assert not actor.ended()


# A learner that comes back.


def attempts(connections: list[float]) -> list[float]:
    """When each began: after a refusal the actor connects once more at once, to see whether it is about TLS."""
    return [at for before, at in itertools.pairwise([0.0, *connections]) if at - before > 0.1]


def most_in_a_second(times: list[float]) -> int:
    return max(sum(begin <= each < begin + 1.0 for each in times) for begin in times)


def test_actors_of_a_learner_that_was_away_stream_again_within_five_seconds_and_had_not_pestered_it(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    """A5: with jittered back-off, at most 2 attempts per second each."""
    took = at_best(5.0, lambda: seconds_of_a_return(start_learner, start_actor))
    print(f"A5: all stream again {took:.1f} s after the port opened")


def seconds_of_a_return(start_learner: StartLearner, start_actor: StartActor) -> float:
    """From the opening of the port until all actors stream; infinite if one of them has tried too often."""
    address = free_address()
    with contextlib.ExitStack() as until_the_end:
        wires = [until_the_end.enter_context(Wire(address)) for _ in range(3)]
        learner = start_learner(listen=address)
        actors: list[RunningActor] = [start_actor(wire.address) for wire in wires]
        eventually(lambda: all(actor.requests > 5 for actor in actors))
        learner.stop()
        for wire in wires:
            wire.cut()
            wire.accepted.clear()
        eventually(lambda: all(len(attempts(wire.accepted)) >= 3 for wire in wires))
        pools = [len(actor.pools) for actor in actors]
        again = start_learner(listen=address)
        opened = time.monotonic()
        eventually(
            lambda: all(len(actor.pools) > n and actor.requests > 5 for actor, n in zip(actors, pools, strict=True))
        )
        took = time.monotonic() - opened
        most = max(most_in_a_second(attempts(wire.accepted)) for wire in wires)
        for actor in actors:
            actor.stop()
        again.stop()
    assert [wrong for actor in actors for wrong in actor.wrong] == []
    return took if most <= 2 else float("inf")
