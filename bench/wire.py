"""Our codec and stream against a bare gRPC echo of the same bytes: no batcher, no inference, nothing recorded.

By rows per message, bytes per row, requests in flight, actors, and tcp or unix. Our client is `python -m bench.wire
ADDRESS ROWS BYTES IN_FLIGHT`; the servers run in the bench's own process.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc
import numpy as np

from bench.echo import EchoServer
from bench.harness import Report, Turn, children, cost_ratio, interleave, median
from bench.rig import any_port, private_address
from bench.service import measure
from seedrl.config import BenchConfig
from seedrl.rows import Rows
from seedrl.serving.lease import Lease
from seedrl.specs import ArraySpec, EnvSpec, discrete
from seedrl.wire import codec
from seedrl.wire.channel import client_options, open_stream, service_handler
from seedrl.wire.messages import Act, StepParts

OTHER_BYTES = 4 + 4 + 1  # of a row: environment, reward, flags


@dataclass(frozen=True, slots=True)
class Case:
    rows: int = 64
    row_bytes: int = 84 * 84
    in_flight: int = 2
    actors: int = 1
    transport: str = "unix"


BASE = Case()
CASES = (
    BASE,
    replace(BASE, rows=1),
    replace(BASE, rows=16),
    replace(BASE, rows=256),
    replace(BASE, row_bytes=16),
    replace(BASE, in_flight=1),
    replace(BASE, actors=4),
    replace(BASE, transport="tcp"),
)


def run(config: BenchConfig) -> Report:
    report = Report("wire")
    seconds, repeats = config.seconds / 2, max(1, config.repeats // 2)
    for case in CASES:
        sides = {"stream": partial(stream, case, seconds), "echo": partial(echo, case, seconds)}
        turns = interleave(sides, repeats)
        for side, measured in turns.items():
            report.add(
                {
                    "side": side,
                    "rows": case.rows,
                    "bytes per row": case.row_bytes,
                    "in flight": case.in_flight,
                    "actors": case.actors,
                    "transport": case.transport,
                    "rows per second": median(measured, lambda turn: turn.rate),
                    "CPU µs per row": median(measured, lambda turn: turn.cpu_us),
                }
            )
        if case == BASE:
            report.add_ratio(cost_ratio("wire_over_echo", turns, "stream", "echo"))
    return report


def stream(case: Case, seconds: float) -> Turn:
    command = [sys.executable, "-m", "bench.wire", "ADDRESS", str(case.rows), str(case.row_bytes), str(case.in_flight)]
    return _exchange(case, seconds, lambda address: DecodingServer(address, case), command)


def echo(case: Case, seconds: float) -> Turn:
    size = case.rows * (case.row_bytes + OTHER_BYTES) + 30
    command = [sys.executable, "-m", "bench.echo", "ADDRESS", str(size), str(case.in_flight)]
    return _exchange(case, seconds, lambda address: EchoServer(address, bytes(4 * case.rows + 10)), command)


def _exchange(case: Case, seconds: float, serve: Callable[[str], EchoServer], command: list[str]) -> Turn:
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(private_address() if case.transport == "unix" else any_port())
        server = stack.enter_context(serve(address))
        own = [address if word == "ADDRESS" else word for word in command]
        pids = [process.pid for process in stack.enter_context(children([own] * case.actors))]
        return measure(lambda: server.messages * case.rows, lambda: server.streams == case.actors, seconds, pids)


def spec_of(row_bytes: int) -> EnvSpec:
    return EnvSpec(ArraySpec((row_bytes,), "uint8"), discrete(6))


class DecodingServer(EchoServer):
    """Checks and decodes every Step as a learner does, and answers it with actions that mean nothing."""

    def __init__(self, address: str, case: Case) -> None:
        super().__init__(address, b"")
        self._spec = spec_of(case.row_bytes)
        self._envs = case.rows * case.in_flight
        self._action = np.zeros(case.rows, np.int32)

    def _handler(self) -> Any:
        return service_handler(self._stream, status=self._stream, control=self._stream)

    async def _stream(self, _: Any, context: Any) -> None:
        lease = Lease(np.arange(self._envs), np.zeros(self._envs, np.uint8))
        self.streams += 1
        while (message := await context.read()) is not grpc.aio.EOF:
            assert isinstance(message, StepParts)
            rows = codec.decode_step(message, self._spec, self._envs)
            lease.admit(rows)
            lease.answered(rows)
            self.messages += 1
            await context.write(codec.encode_act([message.request_id], self._action))


def client(address: str, rows: int, row_bytes: int, in_flight: int) -> None:
    """Keeps `in_flight` Steps on their way until the server goes away."""
    ready = threading.Semaphore(in_flight)
    spec = spec_of(row_bytes)
    observation = np.random.default_rng(1).integers(0, 255, (rows, row_bytes), np.uint8)
    reward, flags = np.ones(rows, np.float32), np.zeros(rows, np.uint8)

    def outgoing() -> Iterator[StepParts]:
        request_id = 0
        while True:
            ready.acquire()
            env_id = np.arange(rows, dtype=np.int32) + rows * (request_id % in_flight)
            request_id += 1
            yield codec.encode_step(request_id, Rows(env_id.astype(np.int32), observation, reward, flags))

    with grpc.insecure_channel(address, options=client_options()) as channel:
        try:
            for data in open_stream(channel, outgoing()):
                act = codec.parse_response(data)
                assert isinstance(act, Act)
                codec.decode_act(act, spec, rows)
                ready.release()
        except grpc.RpcError:
            pass


if __name__ == "__main__":
    client(sys.argv[1], *(int(word) for word in sys.argv[2:5]))
