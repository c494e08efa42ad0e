"""Batches run one after the other, when due, and hold back while the learner is behind."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from seedrl.metrics import ServingMetrics
from seedrl.serving.batch_loop import BatchLoop, Pause, Pauses
from seedrl.serving.batcher import Batcher
from seedrl.serving.sessions import Request
from tests.rig import make_rows

SECONDS = 10.0


class Recorder:
    """An inference that only remembers; `full` unrolls wait for room."""

    def __init__(self) -> None:
        self.launched: list[list[int]] = []
        self.ran: list[list[int]] = []
        self.is_busy = False  # the device works on what was launched
        self.full = False
        self.meanwhile: Callable[[], object] = lambda: None

    def launch(self, requests: list[Request]) -> None:
        self.meanwhile()
        self.launched.append([request.request_id for request in requests])

    @property
    def is_ready(self) -> bool:
        return not self.is_busy

    def finish(self) -> None:
        self.ran.append(self.launched[-1])

    def finish_unrolls(self) -> bool:
        return not self.full


class Stage:
    """A loop that runs batches while `play` acts the part of server and learner."""

    def __init__(self, may_continue: Callable[[], bool] = lambda: True, **options: Any) -> None:
        self.pauses = Pauses()
        options = {"max_rows": 8, "min_rows": 1, "max_wait": 0.001, **options}
        self.batcher: Batcher[Request] = Batcher(**options, on_submit=self.pauses.end)
        self.inference = Recorder()
        self.metrics = ServingMetrics()
        self.batches = BatchLoop(self.batcher, self.inference, self.metrics, self.pauses, may_continue)

    def submit(self, request_id: int) -> None:
        rows = make_rows(np.zeros((2, 1), np.float32))
        session: Any = None
        self.batcher.submit(Request(session, request_id, rows, np.arange(2)))

    async def ran(self, count: int) -> list[list[int]]:
        async with asyncio.timeout(SECONDS):
            while len(self.inference.ran) < count:
                await asyncio.sleep(0.001)
        return self.inference.ran

    def play(self, part: Callable[[], Any]) -> None:
        async def both() -> None:
            running = asyncio.create_task(self.batches.run())
            await part()
            self.batches.stop()
            async with asyncio.timeout(SECONDS):
                await running

        asyncio.run(both())


def test_run_what_waits_before_it_starts_goes_first_and_together() -> None:
    stage = Stage()
    stage.submit(1)
    stage.submit(2)

    async def part() -> None:
        assert await stage.ran(1) == [[1, 2]]
        stage.submit(3)
        assert await stage.ran(2) == [[1, 2], [3]]

    stage.play(part)


def test_run_too_few_rows_go_after_max_wait() -> None:
    stage = Stage(min_rows=8, max_wait=0.01)

    async def part() -> None:
        stage.submit(1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert stage.inference.ran == []
        assert await stage.ran(1) == [[1]]

    stage.play(part)


def test_run_full_store_holds_back_until_woken_and_is_counted() -> None:
    stage = Stage()
    stage.inference.full = True

    async def part() -> None:
        stage.submit(1)
        await asyncio.sleep(0.02)
        assert stage.inference.ran == []
        stage.inference.full = False
        stage.pauses.wake()
        assert await stage.ran(1) == [[1]]

    stage.play(part)
    assert stage.metrics.serving_seconds["hold"] > 0


def test_run_lockstep_waits_for_the_learner() -> None:
    in_step = False
    stage = Stage(may_continue=lambda: in_step)

    async def part() -> None:
        nonlocal in_step
        stage.submit(1)
        await asyncio.sleep(0.02)
        assert stage.inference.ran == []
        in_step = True
        await asyncio.to_thread(stage.pauses.wake)  # as the learner does, from its own thread
        assert await stage.ran(1) == [[1]]

    stage.play(part)


def test_run_lockstep_hands_no_unroll_over_during_an_update() -> None:
    """The learner may pick another train batch meanwhile: whether it finds the unroll would be chance."""
    in_step, handed_over = False, []
    stage = Stage(may_continue=lambda: in_step)
    stage.inference.finish_unrolls = lambda: handed_over.append(in_step) is None  # type: ignore[method-assign]

    async def part() -> None:
        nonlocal in_step
        stage.submit(1)
        await asyncio.sleep(0.02)
        in_step = True
        stage.pauses.wake()
        assert await stage.ran(1) == [[1]]

    stage.play(part)
    assert handed_over
    assert all(handed_over)


def test_run_that_is_held_back_is_alive_as_long_as_the_learner_makes_room() -> None:
    """With replay the unrolls that end together may be worth minutes of updates."""
    stage = Stage()
    stage.inference.full = True

    async def part() -> None:
        stage.submit(1)
        await asyncio.sleep(0.02)
        stage.batches.alive_at = before = 0.0
        stage.pauses.woken_at = 0.0
        await asyncio.sleep(0.02)
        assert stage.batches.alive_at == before
        stage.pauses.wake()
        async with asyncio.timeout(SECONDS):
            while stage.batches.alive_at == before:
                await asyncio.sleep(0.001)

    stage.play(part)


def waits(pauses: list[Pause], arrived: float, now: float) -> dict[str, float]:
    """What a request that came then is said to have waited for."""
    stage = Stage()
    for pause in pauses:
        stage.batches._remember(pause)
    session: Any = None
    request = Request(session, 1, make_rows(np.zeros((2, 1), np.float32)), np.arange(2), arrived=arrived)
    stage.batches._count_waits([request], now)
    assert stage.metrics.queue_wait_seconds.sum == pytest.approx(now - arrived)
    return stage.metrics.queue_seconds


@pytest.mark.parametrize(
    ("pauses", "expected"),
    [
        ([], {"hold": 0.0, "fill": 0.0, "busy": 2.0}),
        ([Pause("hold", 8.0, 9.5)], {"hold": 0.0, "fill": 0.0, "busy": 2.0}),  # over before it came
        ([Pause("hold", 9.0, 10.25)], {"hold": 0.25, "fill": 0.0, "busy": 1.75}),  # only what was left of it
        ([Pause("hold", 10.5, 11.0), Pause("fill", 11.0, 12.0)], {"hold": 0.5, "fill": 1.0, "busy": 0.5}),
        ([Pause("fill", 10.0, 10.5), Pause("fill", 10.5001, 11.0)], {"hold": 0.0, "fill": 1.0, "busy": 1.0}),
    ],
)
def test_waits_are_charged_to_the_pauses_a_request_was_there_for(
    pauses: list[Pause], expected: dict[str, float]
) -> None:
    assert waits(pauses, arrived=10.0, now=12.0) == pytest.approx(expected, abs=1e-9)


def test_waits_of_all_causes_add_up_to_the_wait_of_real_batches() -> None:
    stage = Stage(min_rows=5, max_wait=0.01)

    async def part() -> None:
        for request_id in range(1, 8):
            stage.submit(request_id)
            await asyncio.sleep(0.003)
        await stage.ran(2)

    stage.play(part)
    metrics = stage.metrics
    assert sum(metrics.queue_seconds.values()) == pytest.approx(metrics.queue_wait_seconds.sum, abs=1e-6)
    assert metrics.queue_seconds["fill"] > 0


def test_run_what_has_come_during_a_batch_is_in_the_next_one() -> None:
    """It comes as gRPC brings it: a socket wakes the loop, that resolves a future, and whoever awaits it submits."""
    stage = Stage(max_rows=4)
    for request_id in (1, 2, 3):
        stage.submit(request_id)
    ours, theirs = socket.socketpair()

    async def part() -> None:
        loop = asyncio.get_running_loop()
        read = loop.create_future()
        loop.add_reader(ours, lambda: read.done() or read.set_result(None))
        stage.inference.meanwhile = lambda: theirs.send(b"x")
        await read
        stage.submit(4)
        loop.remove_reader(ours)
        assert await stage.ran(2) == [[1, 2], [3, 4]]

    with ours, theirs:
        stage.play(part)


def test_run_reads_requests_while_the_device_works_and_launches_one_batch_at_a_time() -> None:
    stage = Stage()
    naps: list[float] = []
    stage.batches._nap = naps.append
    stage.inference.is_busy = True
    stage.submit(1)

    async def part() -> None:
        async with asyncio.timeout(SECONDS):
            while len(naps) < 5:
                await asyncio.sleep(0)  # the event loop turns
        stage.submit(2)
        stage.submit(3)
        await asyncio.sleep(0)
        assert (stage.inference.launched, stage.inference.ran) == ([[1]], [])
        stage.inference.is_busy = False
        assert await stage.ran(2) == [[1], [2, 3]]

    stage.play(part)


def test_run_that_is_stopped_while_the_device_works_finishes_the_batch() -> None:
    stage = Stage()
    stage.inference.is_busy = True
    stage.submit(1)

    async def part() -> None:
        while not stage.inference.launched:
            await asyncio.sleep(0)
        stage.batches.stop()
        stage.submit(2)
        await asyncio.sleep(0.01)
        assert stage.inference.ran == []
        stage.inference.is_busy = False

    stage.play(part)
    assert stage.inference.ran == [[1]]
