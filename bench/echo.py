"""The floor of gRPC itself: a bidirectional stream of bytes with no meaning, of the sizes that Step and Act have.

`python -m bench.echo ADDRESS STEP_BYTES ACT_BYTES IN_FLIGHT` is the client; the server runs in the bench's own process.
"""

import asyncio
import sys
import threading
from collections.abc import Iterator
from typing import Any

import grpc

from seedrl.wire.channel import client_options, server_options

METHOD = "/bench.Echo/Stream"


class EchoServer:
    """Answers every message with `reply`; runs in a thread of its own. Counts are read by any thread."""

    def __init__(self, address: str, reply: bytes) -> None:
        self.messages = 0
        self.streams = 0
        self._address = address
        self._reply = reply
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), name="echo")

    def __enter__(self) -> "EchoServer":
        self._thread.start()
        self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        server = grpc.aio.server(options=server_options())
        server.add_generic_rpc_handlers((self._handler(),))
        server.add_insecure_port(self._address)
        await server.start()
        self._started.set()
        await self._stop.wait()
        await server.stop(0)

    def _handler(self) -> Any:
        method = grpc.stream_stream_rpc_method_handler(self._stream)
        return grpc.method_handlers_generic_handler("bench.Echo", {"Stream": method})

    async def _stream(self, _: Any, context: Any) -> None:
        self.streams += 1
        while await context.read() is not grpc.aio.EOF:
            self.messages += 1
            await context.write(self._reply)


def client(address: str, size: int, in_flight: int) -> None:
    """Keeps `in_flight` messages on their way until the server goes away."""
    message = bytes(size)
    turn = threading.Semaphore(in_flight)

    def outgoing() -> Iterator[bytes]:
        while True:
            turn.acquire()
            yield bytes(bytearray(message))  # a copy, as any real sender has to make one

    with grpc.insecure_channel(address, options=client_options()) as channel:
        try:
            for _ in channel.stream_stream(METHOD)(outgoing()):
                turn.release()
        except grpc.RpcError:
            pass


if __name__ == "__main__":
    client(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
