"""Tests of what is bounded however slow or dead the others are: waits, queues, policy lag."""

import threading
import time
import timeit
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from torch import Tensor

from seedrl.metrics import SECONDS, UPDATES, Histogram
from seedrl.roles.learner import LearnerProcess
from seedrl.rows import RESET
from seedrl.specs import EnvSpec
from seedrl.types import ModelInput, ModelOutput, Unrolls
from seedrl.wire import codec
from seedrl.wire.channel import client_options, open_stream
from seedrl.wire.framing import parse, serialize
from seedrl.wire.messages import Hello, Ready, StepParts
from tests.fakes import make_spec
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.support import (
    NUM_ACTIONS,
    SPEC,
    IdleLearnerService,
    OracleModel,
    RawActor,
    RunningLearner,
    make_rows,
)
from tests.integration.waiting import DEADLINE, at_best, eventually, settled

Code = grpc.StatusCode


# Never wait for the absent.


BUSY = 0.02  # seconds that a forward takes beyond its sleep while other tests run


class SlowModel(OracleModel):
    """One forward takes `FORWARD` seconds at least."""

    FORWARD = 0.05

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        time.sleep(self.FORWARD)
        return super().forward(inputs, core_state)


def test_stopped_actor_makes_nobody_wait_longer_than_max_wait_and_one_forward(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    """A7: p99 of the wait ≤ max_wait + one forward, with batches that are never full again."""
    max_wait = 0.05
    learner = start_learner(
        model__name=f"{__name__}:SlowModel",
        serving__min_rows=16,
        serving__max_wait=max_wait,
        actors__groups=1,
    )
    actors = [start_actor(learner.address) for _ in range(3)]
    with RawActor(learner.address) as stopped:
        stopped.join()
        stopped.step()
        assert stopped.receive().HasField("act")  # and it says no more
        eventually(lambda: all(actor.requests for actor in actors))
        p99 = at_best(max_wait + SlowModel.FORWARD + BUSY, lambda: p99_of_waits(learner))
    print(f"p99 of the wait {1000 * p99:.1f} ms of {1000 * (max_wait + SlowModel.FORWARD):.0f}")


def p99_of_waits(learner: RunningLearner) -> float:
    """The next hundred."""
    waits = watch_waits(learner)
    eventually(lambda: len(waits) >= 100)
    return float(np.quantile(waits[:100], 0.99))


def watch_waits(learner: RunningLearner) -> list[float]:
    waits: list[float] = []

    class Waits(Histogram):
        def observe(self, value: float) -> None:
            waits.append(value)

    learner.service.serving.queue_wait_seconds = Waits(SECONDS)
    return waits


# What checking costs.


@pytest.mark.chaos
def test_checking_costs_at_most_two_percent_of_a_step(start_learner: StartLearner) -> None:
    """B2: of the fastest round trip there is, without any environment; the best of many on both sides."""
    envs = 32
    learner = start_learner(serving__max_slots=envs, actors__envs=envs)
    with RawActor(learner.address) as raw:
        session = learner.service.inference.sessions.open[raw.join().session_id]
        trips = []
        for number in range(300):
            rows = make_rows(range(envs), flags=0 if number else RESET)
            began = time.perf_counter()
            raw.send(codec.encode_step(number, rows))
            assert raw.receive().act.request_id == [number]
            trips.append(time.perf_counter() - began)
    step = parse(serialize(codec.encode_step(1, make_rows(range(envs), flags=0))))
    assert isinstance(step, StepParts)

    def check() -> None:
        rows = codec.decode_step(step, SPEC, envs)
        session.admit(rows)
        session.answered(rows)

    checks = min(timeit.repeat(check, number=100, repeat=20)) / 100
    print(f"checks {1e6 * checks:.1f} µs of {1e6 * min(trips):.0f} µs: {100 * checks / min(trips):.2f} %")
    assert checks <= 0.02 * min(trips)


# Every queue.


def test_queues_stay_within_their_bounds_while_inference_stands_still(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    """A8: ten times as many actors, and one that sends ten times what it may: refusals, and no queue grows."""
    slots = 16
    learner = start_learner(IdleLearnerService, serving__max_slots=slots)
    service = learner.service
    actors = [start_actor(learner.address) for _ in range(3)]
    eventually(lambda: service.serving.serving_seconds["hold"] > 0.2)
    with RawActor(learner.address) as pushing:
        pushing.join()
        for request_id in range(10):
            pushing.step(request_id)
        code, words = pushing.status()
        assert code is Code.INVALID_ARGUMENT
        assert "no row in flight" in words
    joined = [RawActor(learner.address) for _ in range(10 * slots // 4)]
    for raw in joined:
        raw.hello()
    eventually(lambda: sum(service.serving.sessions_refused.values()) == len(joined) - 1)
    refused = service.serving.sessions_refused["no_capacity"]
    for raw in joined:
        raw.cut()
    assert refused == len(joined) - 1
    assert service.inference.batcher.waiting_rows <= slots
    assert service.training.store.ready == service.training.store.capacity
    assert all(each.outbox.qsize() <= slots for each in service.inference.protocol.connections.values())
    assert not any(actor.ended() for actor in actors)


class FrozenService(LearnerProcess):
    """Stops for good in its first batch: the server thread itself stands still, until `gate` opens."""

    gate: threading.Event
    stands_still: threading.Event

    def _build(self, spec: Any) -> None:
        super()._build(spec)
        launch = self.inference.batches._inference.launch

        def frozen(requests: Any) -> None:
            self.stands_still.set()
            assert self.gate.wait(DEADLINE)
            launch(requests)

        self.inference.batches._inference.launch = frozen  # type: ignore[method-assign]


def test_client_is_slowed_by_flow_control_while_the_server_thread_stands_still(start_learner: StartLearner) -> None:
    """A8: of ten times 16 MiB that are pushed, gRPC takes no more than a few windows before somebody reads."""
    FrozenService.gate, FrozenService.stands_still = threading.Event(), threading.Event()
    spec = make_spec((60 * 1024,), num_actions=NUM_ACTIONS)
    learner = start_learner(FrozenService, algorithm__unroll_length=1, serving__max_slots=4)
    message = codec.encode_step(1, make_rows(spec=spec))  # almost 1 MiB
    taken = 0

    def push() -> Iterator[Any]:
        nonlocal taken
        yield Hello("pushing")
        yield Ready(spec)
        yield message
        assert FrozenService.stands_still.wait(DEADLINE)
        for _ in range(160):
            taken += 1
            yield message

    with grpc.insecure_channel(learner.address, options=client_options()) as channel:
        call = open_stream(channel, push())
        eventually(lambda: taken > 1)
        accepted = settled(lambda: taken)
        print(f"{accepted} MiB of 160 were taken")
        assert accepted <= 32
        FrozenService.gate.set()
        with pytest.raises(grpc.RpcError):
            list(call)
        assert call.code() is Code.INVALID_ARGUMENT  # two rows of an environment at once


# Policy lag.


class SlowLearnerService(LearnerProcess):
    """Its updates take ten times as long as its actors need to make a train batch."""

    def _build(self, spec: EnvSpec) -> None:
        super()._build(spec)
        assert self.training is not None
        learner = self.training.learner
        train = learner.train

        def slow(unrolls: Unrolls) -> None:
            self.stop.wait(0.05)
            train(unrolls)

        learner.train = slow  # type: ignore[method-assign]


@pytest.mark.parametrize("capacity", [4, 16])
def test_policy_lag_of_a_slow_learner_is_bounded_and_nothing_is_dropped(
    start_learner: StartLearner, start_actor: StartActor, capacity: int
) -> None:
    """A9: lag ≤ 1 + (store.capacity + 2 slots) / batch_size; producers wait instead of being dropped."""
    slots, batch_size = 8, 4
    learner = start_learner(
        SlowLearnerService, serving__max_slots=slots, store__capacity=capacity, algorithm__batch_size=batch_size
    )
    service = learner.service
    actors = [start_actor(learner.address) for _ in range(2)]
    eventually(lambda: service.training is not None)
    lags = watch_lags(learner)
    eventually(lambda: len(lags) >= 40)
    bound = 1 + (capacity + 2 * slots) // batch_size
    print(f"policy lag at most {max(lags)} of {bound}")
    assert max(lags) <= bound
    assert service.serving.serving_seconds["hold"] > 0.5
    assert sum(service.serving.rows_dropped.values()) == 0
    assert sum(service.serving.unrolls_dropped.values()) == 0
    unread = service.serving.unrolls_made - service.learning.unrolls_trained
    assert 0 <= unread <= capacity + batch_size
    assert not any(actor.ended() or actor.wrong for actor in actors)


def watch_lags(learner: RunningLearner) -> list[int]:
    """The highest of each update."""
    lags: list[int] = []

    class Lags(Histogram):
        def observe_all(self, values: Any) -> None:
            lags.append(int(values.max()))
            super().observe_all(values)

    learner.service.learning.policy_lag = Lags(UPDATES)
    return lags
