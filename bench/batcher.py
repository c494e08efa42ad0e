"""Requests per second through the batcher, and how long they wait in it, without torch or gRPC."""

import time
from dataclasses import dataclass
from functools import partial

import numpy as np

from bench.harness import Report, Turn, interleave, median, run_for
from seedrl.config import BenchConfig
from seedrl.serving.batcher import Batcher


@dataclass(frozen=True, slots=True)
class Waiting:
    rows: int
    since: float


def run(config: BenchConfig) -> Report:
    report = Report("batcher")
    for producers in (1, 4, 16):
        waits: list[float] = []
        turns = interleave({"batcher": partial(pump, config.seconds, producers, waits)}, config.repeats)
        report.add(
            {
                "producers": producers,
                "requests/s": median(turns["batcher"], lambda turn: turn.rate),
                "CPU µs per request": median(turns["batcher"], lambda turn: turn.cpu_us),
                "wait p50 µs": float(1e6 * np.quantile(waits, 0.5)),
                "wait p99 µs": float(1e6 * np.quantile(waits, 0.99)),
            }
        )
    return report


def pump(seconds: float, producers: int, waits: list[float]) -> Turn:
    """Each producer has two requests in flight, as an actor with two groups has, and sends the next when answered."""
    batcher: Batcher[Waiting] = Batcher(max_rows=256, min_rows=1, max_wait=0.005)
    for _ in range(2 * producers):
        batcher.submit(Waiting(64, time.perf_counter()))

    def serve() -> int:
        batch = batcher.take()
        now = time.perf_counter()
        waits.extend(now - request.since for request in batch)
        for _ in batch:
            batcher.submit(Waiting(64, time.perf_counter()))
        return len(batch)

    return run_for(seconds, serve)
