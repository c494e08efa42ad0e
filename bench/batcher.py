"""Requests per second through the batcher, and how long they wait in it, without torch or gRPC."""

import threading
import time
from dataclasses import dataclass
from functools import partial

import numpy as np

from bench.harness import Report, Turn, interleave, median
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
    """Each producer has two requests in flight, as an actor with two groups has."""
    batcher: Batcher[Waiting] = Batcher(max_rows=256, min_rows=1, max_wait=0.005)
    credit = threading.Semaphore(2 * producers)
    stopping = threading.Event()

    def produce() -> None:
        while not stopping.is_set():
            if credit.acquire(timeout=0.05):
                batcher.submit(Waiting(64, time.perf_counter()))

    threads = [threading.Thread(target=produce) for _ in range(producers)]
    for thread in threads:
        thread.start()
    count, began, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        batch = batcher.take(timeout=0.1)
        now = time.perf_counter()
        waits.extend(now - request.since for request in batch)
        count += len(batch)
        credit.release(len(batch)) if batch else None
    turn = Turn(count, time.perf_counter() - began, time.process_time() - cpu)
    stopping.set()
    for thread in threads:
        thread.join()
    return turn
