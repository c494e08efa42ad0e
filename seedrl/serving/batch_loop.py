"""Runs one batch after the other: the batcher says when, inference how. Knows nothing of what is in them.

All of it happens in the server thread, between reading requests and writing answers. A thread of its own for inference
would cost two hand-overs of the interpreter per batch and share it with the server anyway; gRPC's own threads go on
receiving while a batch runs.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from seedrl.metrics import ServingMetrics
from seedrl.serving.batcher import Batcher
from seedrl.serving.sessions import Request

LONGEST_PAUSE = 0.1  # seconds; a wake-up that got lost costs no more
NO_GAP = 0.001  # seconds between two pauses that are one
CAUSES = ("hold", "fill")  # pauses in which requests wait


TURNS = 3  # of the event loop until what has come meanwhile is read: gRPC is heard, its futures resolve, readers go on


class Pause(NamedTuple):
    stage: str
    began: float
    ended: float


class Runner(Protocol):
    """What runs a batch: Inference."""

    def run(self, requests: list[Request]) -> None: ...

    def finish_unrolls(self) -> bool: ...


class BatchLoop:
    """Owned by the server thread, except `wake`, `stop` and `alive_at`, which are for any thread."""

    def __init__(
        self,
        batcher: Batcher[Request],
        inference: Runner,
        metrics: ServingMetrics,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        self._batcher = batcher
        self._inference = inference
        self._metrics = metrics
        self._may_go_on = may_go_on  # false while a lock-step run waits for an update
        self._stopping = False
        self.alive_at = time.monotonic()  # when the newest batch ended, or when last nobody waited for one
        self._loop: asyncio.AbstractEventLoop | None = None
        self._paused: asyncio.Future[None] | None = None
        self._pauses: deque[Pause] = deque(maxlen=64)  # that made requests wait, of late
        batcher.on_submit = self._go_on

    async def run(self) -> None:
        """Until `stop`."""
        self._loop = asyncio.get_running_loop()
        while not self._stopping:
            if not self._batcher.waiting_rows:
                self.alive_at = time.monotonic()
            if not self._inference.finish_unrolls() or not self._may_go_on():
                await self._pause(LONGEST_PAUSE, "hold")  # actors wait for the learner
            elif requests := self._batcher.take():
                self._count_waits(requests, time.monotonic())
                self._inference.run(requests)
                self.alive_at = time.monotonic()
                await self._account("send", _turns())
            else:
                await self._wait_for_rows()

    def wake(self) -> None:
        """The learner has freed unrolls or published a policy."""
        if self._paused is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._go_on)

    def stop(self) -> None:
        self._stopping = True
        self.wake()

    async def _wait_for_rows(self) -> None:
        due = self._batcher.due_in()
        if due is None:
            await self._pause(LONGEST_PAUSE, "idle")
        else:
            await self._pause(min(due, LONGEST_PAUSE), "fill")

    def _go_on(self) -> None:
        if self._paused is not None and not self._paused.done():
            self._paused.set_result(None)

    async def _pause(self, seconds: float, stage: str) -> None:
        loop = asyncio.get_running_loop()
        self._paused = loop.create_future()
        timer = loop.call_later(seconds, self._go_on)
        await self._account(stage, self._paused)
        timer.cancel()
        self._paused = None

    async def _account(self, stage: str, pause: Awaitable[None]) -> None:
        """Adds the time of a pause to a stage, but for what was spent reading requests meanwhile."""
        spent = self._metrics.serving_seconds
        began, read_before = time.monotonic(), spent["read"]
        await pause
        ended = time.monotonic()
        spent[stage] += ended - began - (spent["read"] - read_before)
        if stage in CAUSES:
            self._remember(Pause(stage, began, ended))

    def _remember(self, pause: Pause) -> None:
        last = self._pauses[-1] if self._pauses else None
        if last is not None and last.stage == pause.stage and pause.began - last.ended < NO_GAP:
            self._pauses[-1] = last._replace(ended=pause.ended)
        else:
            self._pauses.append(pause)

    def _count_waits(self, requests: list[Request], now: float) -> None:
        """How long requests have waited for this batch, and why."""
        metrics = self._metrics
        for request in requests:
            waited = busy = now - request.arrived
            for pause in reversed(self._pauses):
                if pause.ended <= request.arrived:
                    break
                shared = pause.ended - max(pause.began, request.arrived)
                metrics.queue_seconds[pause.stage] += shared
                busy -= shared
            metrics.queue_seconds["busy"] += busy
            metrics.queue_wait_seconds.observe(waited)


async def _turns() -> None:
    """Answers leave, and what has come during a batch is read, so that it is part of the next one."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
