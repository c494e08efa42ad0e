"""Everything but the simulator and the model, against a bare gRPC echo of the same bytes: CPU per observation.

Both ends are counted: this process serves, the actors are processes of their own with a pool that costs nothing. With a
model that takes a fixed time without the GIL, as an accelerator would, the latency of actions is measured as well.
"""

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from bench.echo import EchoServer
from bench.harness import Report, Turn, children, cost_ratio, cpu_seconds, interleave, median, rss_bytes
from bench.rig import NullModel, ServingRig, any_port, private_address, vtrace_config
from seedrl.config import BenchConfig, LearnerConfig

FRAME = 84 * 84
ROWS = 64  # of one message
BATCHED = 256  # rows of a batch, in the headline
WARM_UP = 0.5
FORWARD = 0.005  # seconds: the accelerator of the latency figures
TRAINING_STEP = 2.0  # seconds


def run(config: BenchConfig) -> Report:
    report = Report("service")
    compare_transports(report, config)
    compare_sizes(report, config)
    compare_latency(report, config)
    return report


def compare_transports(report: Report, config: BenchConfig) -> None:
    """Eight requests in flight, batched by four: what a learner that is busy enough sees. Then two, one at a time."""
    seconds, groups = config.seconds, BATCHED // ROWS * 2
    busy = partial(service, seconds, groups=groups, min_rows=BATCHED)
    sides: dict[str, Callable[[], Turn]] = {
        "echo": partial(echo, seconds, in_flight=groups),
        "service": busy,
        "tcp": partial(busy, address=any_port),
        "shared memory": partial(busy, shared_memory=True),
        "echo, 2 in flight": partial(echo, seconds, in_flight=2),
        "service, 2 in flight": partial(service, seconds),
    }
    turns = interleave(sides, config.repeats)
    for name, side in turns.items():
        report.add(_row(name, 1, (2 if "2 in flight" in name else groups) * ROWS, side))
    report.add_ratio(cost_ratio("service_over_echo", turns, "service", "echo", bound=1.5))
    report.add_ratio(cost_ratio("service_over_echo_2_in_flight", turns, "service, 2 in flight", "echo, 2 in flight"))
    report.add_ratio(cost_ratio("shm_over_tcp", turns, "shared memory", "tcp", bound=0.6))


def compare_sizes(report: Report, config: BenchConfig) -> None:
    """More actors, more environments; a machine of two cores starts 32 actors slowly, so their turns are fewer."""
    few = max(1, config.repeats // 2)
    for actors in (8, 64):
        turn = service(config.seconds, actors=actors)
        report.add(_row("service", actors, actors * 2 * ROWS, [turn]))
    turns = interleave({"1": partial(service, config.seconds), "32": partial(service, config.seconds, actors=32)}, few)
    for name, side in turns.items():
        report.add(_row("service", int(name), int(name) * 2 * ROWS, side))
    report.add_ratio(cost_ratio("actors32_over_1", turns, "32", "1", bound=1.3))

    memory: dict[str, int] = {}
    batched = partial(service, config.seconds, min_rows=BATCHED // 2, memory=memory)
    turns = interleave({str(envs): partial(batched, groups=envs // ROWS) for envs in (256, 4096)}, config.repeats)
    for envs, side in turns.items():
        report.add(_row("service, batches of 128", 1, int(envs), side))
    report.add_ratio(cost_ratio("envs4096_over_256", turns, "4096", "256", bound=1.1))
    per_env = (memory["4096"] - memory["256"]) / (4096 - 256)
    unroll = (vtrace_config().algorithm.unroll_length + 1) * FRAME
    report.note(
        f"learner RSS grows by {per_env / 1024:.0f} KiB per environment; its unroll has {unroll / 1024:.0f} KiB"
    )


def compare_latency(report: Report, config: BenchConfig) -> None:
    """Half load: as long a pause between two requests of a group as makes the model busy half of the time."""
    for name, training in (("half load", False), ("half load, 2 s training step", True)):
        waits = latency(max(4 * config.seconds, 2 * TRAINING_STEP), training)
        report.add({"side": name, "forward ms": 1e3 * FORWARD, **waits})
    allowed = 1e3 * (LearnerConfig().serving.max_wait + 2 * FORWARD)
    report.note(f"wanted at half load: p99 ≤ max_wait + 2 forwards = {allowed:.0f} ms; training moves it by ≤ 5 ms")


def service(
    seconds: float,
    actors: int = 1,
    groups: int = 2,
    address: Callable[[], contextlib.AbstractContextManager[str]] = private_address,
    shared_memory: bool = False,
    min_rows: int = 1,
    memory: dict[str, int] | None = None,
) -> Turn:
    """Serves mock actors with a null model, recording included. `memory` gets the learner's growth, by environments."""
    config = mock_config(actors, groups)
    before = settled_rss()
    config.serving.shared_memory = shared_memory
    config.serving.min_rows = min_rows
    with address() as config.listen:
        command = [sys.executable, "-m", "envs_server", f"learner={config.listen}"]
        with ServingRig(config, lambda spec: NullModel(spec.policy_size)) as rig, children([command] * actors) as pids:
            turn = measure(lambda: rig.metrics.rows, lambda: rig.served == actors, seconds, [each.pid for each in pids])
            if memory is not None:
                memory[str(config.actors.envs)] = rss_bytes(os.getpid()) - before
            return turn


def settled_rss() -> int:
    """Return the memory of this process, once what earlier turns have freed is given back."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    return rss_bytes(os.getpid())


def mock_config(actors: int, groups: int) -> LearnerConfig:
    config = vtrace_config()
    config.env.id = "mock"
    config.env.options = {"shape": [1, 84, 84]}
    config.actors.envs = ROWS * groups
    config.actors.groups = groups
    config.serving.max_slots = actors * config.actors.envs
    return config


def echo(seconds: float, in_flight: int = 2) -> Turn:
    """A stream of bytes of the same sizes, meaning nothing."""
    step, act = ROWS * (FRAME + 4 + 4 + 1) + 30, ROWS * 4 + 10
    with private_address() as address, EchoServer(address, bytes(act)) as server:
        command = [sys.executable, "-m", "bench.echo", address, str(step), str(in_flight)]
        with children([command]) as pids:
            return measure(
                lambda: server.messages * ROWS, lambda: server.messages > 0, seconds, [each.pid for each in pids]
            )


def latency(seconds: float, training: bool) -> dict[str, Any]:
    """Return what `bench.probe` sees of a learner whose forward takes FORWARD."""
    config = mock_config(actors=1, groups=2)
    with private_address() as config.listen:
        command = [sys.executable, "-m", "bench.probe", config.listen, str(seconds), str(3 * FORWARD)]
        with ServingRig(config, lambda spec: NullModel(spec.policy_size, FORWARD)), training_steps(training):
            probe = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, check=True)
    found: dict[str, Any] = json.loads(probe.stdout.splitlines()[-1])
    return found


@contextlib.contextmanager
def training_steps(wanted: bool) -> Iterator[None]:
    """A thread that computes without the GIL, TRAINING_STEP at a time, as an update on this machine would."""
    stopping = threading.Event()

    def train() -> None:
        torch.set_num_threads(1)
        a = torch.randn(1500, 1500)
        while not stopping.wait(0.2):
            until = time.monotonic() + TRAINING_STEP
            while time.monotonic() < until and not stopping.is_set():
                torch.mm(a, a)

    thread = threading.Thread(target=train, name="training")
    if wanted:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        if wanted:
            thread.join()


def measure(rows: Callable[[], int], is_ready: Callable[[], bool], seconds: float, pids: Sequence[int]) -> Turn:
    """Rows served in a while, once every actor is being served, and the CPU time of both ends."""
    give_up = time.monotonic() + 180
    while not is_ready():
        if time.monotonic() > give_up:
            raise TimeoutError("not all actors were served within 180 s")
        time.sleep(0.05)
    time.sleep(WARM_UP)
    rows_before, began = rows(), time.perf_counter()
    cpu_before = time.process_time() + cpu_seconds(pids)
    time.sleep(seconds)
    cpu = time.process_time() + cpu_seconds(pids) - cpu_before
    return Turn(rows() - rows_before, time.perf_counter() - began, cpu)


def _row(side: str, actors: int, envs: int, turns: list[Turn]) -> dict[str, object]:
    return {
        "side": side,
        "actors": actors,
        "envs": envs,
        "rows per second": median(turns, lambda turn: turn.rate),
        "CPU µs per row": median(turns, lambda turn: turn.cpu_us),
    }
