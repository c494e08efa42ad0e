"""Everything but the simulator and the model, against a bare gRPC echo of the same bytes: CPU per observation.

Both ends are counted: this process serves, the actors are processes of their own with a pool that costs nothing.
"""

import sys
import time
from collections.abc import Callable, Sequence

from bench.echo import EchoServer
from bench.harness import Ratio, Report, Turn, children, cpu_seconds, interleave, median, paired
from bench.rig import NullModel, ServingRig, private_address
from seedrl.config import BenchConfig, LearnerConfig

FRAME = 84 * 84
ROWS = 64  # of one message
WARM_UP = 1.0


def run(config: BenchConfig) -> Report:
    report = Report("service")
    turns = interleave(
        {
            "echo": lambda: echo(config.seconds),
            "service": lambda: service(config.seconds),
        },
        config.repeats,
    )
    for name, side in turns.items():
        report.add(_row(name, 1, 2 * ROWS, side))
    report.add_ratio(Ratio("service_over_echo", paired(turns, "service", "echo", _cpu), bound=1.5))

    turns = interleave(
        {"1": lambda: service(config.seconds), "32": lambda: service(config.seconds, actors=32)}, config.repeats
    )
    report.add(_row("service", 32, 32 * 2 * ROWS, turns["32"]))
    report.add_ratio(Ratio("actors32_over_1", paired(turns, "32", "1", _cpu), bound=1.3))

    turns = interleave(
        {
            "256": lambda: service(config.seconds, groups=256 // ROWS),
            "4096": lambda: service(config.seconds, groups=4096 // ROWS),
        },
        config.repeats,
    )
    for envs, side in turns.items():
        report.add(_row("service", 1, int(envs), side))
    report.add_ratio(Ratio("envs4096_over_256", paired(turns, "4096", "256", _cpu), bound=1.1))
    return report


def service(seconds: float, actors: int = 1, groups: int = 2) -> Turn:
    """Serves mock actors with a null model, recording included."""
    config = LearnerConfig()
    config.env.id = "mock"
    config.env.options = {"shape": [1, 84, 84]}
    config.actors.envs = ROWS * groups
    config.actors.groups = groups
    config.serving.max_slots = actors * config.actors.envs
    with private_address() as address:
        config.listen = address
        command = [sys.executable, "-m", "envs_server", f"learner={address}"]
        with ServingRig(config, lambda spec: NullModel(spec.num_actions)) as rig, children([command] * actors) as pids:
            return _measure(
                lambda: rig.metrics.rows, lambda: rig.served == actors, seconds, [each.pid for each in pids]
            )


def echo(seconds: float, in_flight: int = 2) -> Turn:
    """A stream of bytes of the same sizes, meaning nothing."""
    step, act = ROWS * (FRAME + 4 + 4 + 1) + 30, ROWS * 4 + 10
    with private_address() as address, EchoServer(address, bytes(act)) as server:
        command = [sys.executable, "-m", "bench.echo", address, str(step), str(in_flight)]
        with children([command]) as pids:
            return _measure(
                lambda: server.messages * ROWS, lambda: server.messages > 0, seconds, [each.pid for each in pids]
            )


def _measure(rows: Callable[[], int], is_ready: Callable[[], bool], seconds: float, pids: Sequence[int]) -> Turn:
    """Rows served in a while, once every actor is being served, and the CPU time of both ends."""
    give_up = time.monotonic() + 120
    while not is_ready():
        if time.monotonic() > give_up:
            raise TimeoutError("not all actors were served within 120 s")
        time.sleep(0.05)
    time.sleep(WARM_UP)
    rows_before, began = rows(), time.perf_counter()
    cpu_before = time.process_time() + cpu_seconds(pids)
    time.sleep(seconds)
    cpu = time.process_time() + cpu_seconds(pids) - cpu_before
    return Turn(rows() - rows_before, time.perf_counter() - began, cpu)


def _cpu(turn: Turn) -> float:
    return turn.cpu_us


def _row(side: str, actors: int, envs: int, turns: list[Turn]) -> dict[str, object]:
    return {
        "side": side,
        "actors": actors,
        "envs": envs,
        "rows per second": median(turns, lambda turn: turn.rate),
        "CPU µs per row": median(turns, _cpu),
    }
