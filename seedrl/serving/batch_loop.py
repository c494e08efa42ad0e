"""Runs one batch after the other: the batcher decides when, inference knows how. Knows nothing of their content.

All of it happens in the server thread, between reading requests and writing answers. An accelerator works on a batch
by itself: requests are read meanwhile, and wait for the next one. A thread of its own for inference
would cost two hand-overs of the interpreter per batch and share it with the server anyway; gRPC's own threads keep
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
NAP = 0.0001  # seconds; asyncio would sleep a millisecond at least, and a small batch takes less
NO_GAP = 0.001  # seconds between two pauses that are one
CAUSES = ("hold", "fill")  # pauses in which requests wait


# Turns of the event loop until requests that arrived during a batch are read: gRPC's events are polled, its futures
# resolve, and the readers continue.
TURNS = 3


class Pause(NamedTuple):
    stage: str
    began: float
    ended: float


class Runner(Protocol):
    """The part of Inference that the loop uses."""

    def launch(self, requests: list[Request]) -> None: ...

    @property
    def is_ready(self) -> bool: ...

    def finish(self) -> None: ...

    def finish_unrolls(self) -> bool: ...


class Pauses:
    """Lets the batch loop wait and wakes it. Owned by the server thread, except `wake`, which is for any thread."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pending: asyncio.Future[None] | None = None
        self.woken_at = time.monotonic()

    async def pause(self, seconds: float) -> None:
        """Wait until something happens, at most this long."""
        self._loop = asyncio.get_running_loop()
        self._pending = self._loop.create_future()
        timer = self._loop.call_later(seconds, self.end)
        await self._pending
        timer.cancel()
        self._pending = None

    def end(self) -> None:
        """End the pause, if there is one."""
        if self._pending is not None and not self._pending.done():
            self._pending.set_result(None)

    def wake(self) -> None:
        """End the pause from another thread."""
        self.woken_at = time.monotonic()
        if self._pending is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self.end)


class BatchLoop:
    """Owned by the server thread, except `stop` and `alive_at`, which are for any thread."""

    def __init__(
        self,
        batcher: Batcher[Request],
        inference: Runner,
        metrics: ServingMetrics,
        pauses: Pauses,
        may_continue: Callable[[], bool] = lambda: True,
        nap: Callable[[float], None] = time.sleep,
    ) -> None:
        """`may_continue` is false while a lock-step run waits for an update; `nap` lets the thread sleep."""
        self._nap = nap
        self._batcher = batcher
        self._inference = inference
        self._metrics = metrics
        self._pauses = pauses
        self._may_continue = may_continue
        self._stopping = False
        self.alive_at = time.monotonic()  # when a batch ended, no request waited, or the learner made room for some
        self._recent: deque[Pause] = deque(maxlen=64)  # pauses that made requests wait

    async def run(self) -> None:
        """Run batches until `stop`."""
        while not self._stopping:
            if not self._batcher.waiting_rows:
                self.alive_at = time.monotonic()
            if not self._is_in_step():
                await self._pause(LONGEST_PAUSE, "hold")  # actors wait for the learner
                self.alive_at = max(self.alive_at, self._pauses.woken_at)  # they may wait for many updates
            elif requests := self._batcher.take():
                self._count_waits(requests, time.monotonic())
                self._inference.launch(requests)
                await self._device()
                self._inference.finish()
                self.alive_at = time.monotonic()
                await self._account("send", _turns())
            else:
                await self._wait_for_rows()

    async def _device(self) -> None:
        """Let requests be read while an accelerator works; on the CPU a batch is over when it was launched."""
        while not self._inference.is_ready:
            await self._account("forward", self._turn())

    async def _turn(self) -> None:
        """Read what has come, and leave the interpreter to the learner for a moment."""
        await asyncio.sleep(0)
        self._nap(NAP)

    def _is_in_step(self) -> bool:
        """Hand unrolls over and return whether a batch may run. In lock-step neither happens during an update."""
        return self._may_continue() and self._inference.finish_unrolls() and self._may_continue()

    def stop(self) -> None:
        self._stopping = True
        self._pauses.wake()

    async def _wait_for_rows(self) -> None:
        due = self._batcher.due_in()
        if due is None:
            await self._pause(LONGEST_PAUSE, "idle")
        else:
            await self._pause(min(due, LONGEST_PAUSE), "fill")

    async def _pause(self, seconds: float, stage: str) -> None:
        await self._account(stage, self._pauses.pause(seconds))

    async def _account(self, stage: str, pause: Awaitable[None]) -> None:
        """Add the time of a pause to a stage, except what was spent reading requests meanwhile."""
        spent = self._metrics.serving_seconds
        began, read_before = time.monotonic(), spent["read"]
        await pause
        ended = time.monotonic()
        spent[stage] += ended - began - (spent["read"] - read_before)
        if stage in CAUSES:
            self._remember(Pause(stage, began, ended))

    def _remember(self, pause: Pause) -> None:
        last = self._recent[-1] if self._recent else None
        if last is not None and last.stage == pause.stage and pause.began - last.ended < NO_GAP:
            self._recent[-1] = last._replace(ended=pause.ended)
        else:
            self._recent.append(pause)

    def _count_waits(self, requests: list[Request], now: float) -> None:
        """Count how long requests have waited for this batch, and why."""
        metrics = self._metrics
        for request in requests:
            waited = busy = now - request.arrived
            for pause in reversed(self._recent):
                if pause.ended <= request.arrived:
                    break
                shared = pause.ended - max(pause.began, request.arrived)
                metrics.queue_seconds[pause.stage] += shared
                busy -= shared
            metrics.queue_seconds["busy"] += busy
            metrics.queue_wait_seconds.observe(waited)


async def _turns() -> None:
    """Let answers leave, and let requests that came during a batch be read, so that they join the next one."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
