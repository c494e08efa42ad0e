"""A bad network between an actor and a learner: a proxy that cuts, delays, throttles and swallows what passes.

python -m tests.chaos.proxy LISTEN TARGET [delay=SECONDS]    the same as a process, for a network namespace of its own
"""

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHUNK = 65_536
CHUNKS = 64  # on their way at once, each way; a sender waits for more
Delayed = asyncio.Queue[tuple[float, bytes] | None]


@dataclass(eq=False, slots=True)
class Link:
    """One connection through the proxy. Owned by the proxy's thread."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    is_black_hole: bool = False  # nothing passes any more, not even its end

    def cut(self) -> None:
        for writer in (self.near, self.far):
            writer.transport.abort()


class Proxy:
    """Passes bytes on. The public methods and attributes are for any thread.

    `delay` and `bytes_per_second` hold for every connection, each way; `cut` and `black_hole` for those that are open
    now: new ones work again.
    """

    def __init__(self, target: str, listen: str = "127.0.0.1:0", delay: float = 0.0) -> None:
        self.delay = delay
        self.bytes_per_second = 0.0  # 0 for any number
        self.accepted = 0  # connections so far
        self._target = _split(target)
        self._links: set[Link] = set()
        self._loop = asyncio.new_event_loop()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._accept, *_split(listen)))
        self.address = "{}:{}".format(*self._server.sockets[0].getsockname())
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def cut(self) -> None:
        """Ends every connection at once, without any goodbye of HTTP/2."""
        self._call(self._cut)

    def black_hole(self) -> None:
        """Leaves every connection half-open: neither end hears of the other again, nor that it is gone."""
        self._call(self._lose)

    def heal(self) -> None:
        self.delay = self.bytes_per_second = 0.0

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._call(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, function: Callable[[], Any]) -> None:
        self._loop.call_soon_threadsafe(function)

    # Everything below runs in the proxy's thread.

    def _cut(self) -> None:
        for link in self._links:
            link.cut()

    def _lose(self) -> None:
        for link in self._links:
            link.is_black_hole = True

    async def _end(self) -> None:
        self._server.close()
        self._cut()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _accept(self, near_reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        self.accepted += 1
        try:
            far_reader, far = await asyncio.open_connection(*self._target)
        except OSError:
            near.transport.abort()
            return
        link = Link(near, far)
        self._links.add(link)
        try:
            await asyncio.gather(self._pass(link, near_reader, far), self._pass(link, far_reader, near))
        finally:
            link.cut()
            self._links.discard(link)

    async def _pass(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction of a link, until it ends; the other one ends with it."""
        delayed: Delayed = asyncio.Queue(CHUNKS)
        writing = asyncio.create_task(self._write(link, delayed, writer))
        with contextlib.suppress(OSError):
            while content := await reader.read(CHUNK):
                await delayed.put((self._loop.time() + self.delay, content))
        if not link.is_black_hole:
            await delayed.put(None)
            await writing
            link.cut()
        writing.cancel()

    async def _write(self, link: Link, delayed: Delayed, writer: asyncio.StreamWriter) -> None:
        while (item := await delayed.get()) is not None:
            due, content = item
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            if self.bytes_per_second:
                await asyncio.sleep(len(content) / self.bytes_per_second)
            if not link.is_black_hole:
                with contextlib.suppress(OSError):
                    writer.write(content)
                    await writer.drain()


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def main(listen: str, target: str, delay: str = "delay=0") -> None:
    with Proxy(target, listen, float(delay.partition("=")[2])) as proxy:
        print(f"proxy: {proxy.address} to {target}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
