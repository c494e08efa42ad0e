"""Clients that connect to a learner and send something else than gRPC, or nothing. Needs only the standard library.

python -m tests.integration.strangers HOST:PORT KIND CONNECTIONS AT_ONCE SEED PER_SECOND
python -m tests.integration.strangers sink        listens instead and prints its address: what a flood costs by itself
"""

import contextlib
import math
import random
import selectors
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable

Stranger = Callable[[socket.socket, random.Random], None]


def say_garbage(line: socket.socket, chance: random.Random) -> None:
    line.sendall(chance.randbytes(chance.randint(1, 4096)))


def say_http1(line: socket.socket, chance: random.Random) -> None:
    line.sendall(b"GET /metrics HTTP/1.1\r\nHost: learner\r\nConnection: keep-alive\r\n\r\n")


def say_random_frames(line: socket.socket, chance: random.Random) -> None:
    """Send the preface of HTTP/2 and well-formed frames with random content."""
    frames = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", _frame(4, 0, 0, b"")]
    for _ in range(chance.randint(1, 20)):
        kind, flags, stream = chance.randint(0, 12), chance.randint(0, 255), chance.choice([0, 1, 3, 5, 2**31 - 1])
        frames.append(_frame(kind, flags, stream, chance.randbytes(chance.randint(0, 512))))
    line.sendall(b"".join(frames))


def say_nothing(line: socket.socket, chance: random.Random) -> None:
    pass


STRANGERS: tuple[Stranger, ...] = (say_garbage, say_http1, say_random_frames, say_nothing)


def flood(
    address: str, say: Stranger, connections: int, at_once: int, seed: int = 1, per_second: float = math.inf
) -> None:
    """Open connections, keep them, and close the oldest when there are too many."""
    host, _, port = address.rpartition(":")
    chance, lines, began = random.Random(seed), deque[socket.socket](), time.monotonic()
    for number in range(connections):
        time.sleep(max(0.0, began + number / per_second - time.monotonic()))
        lines.append(socket.create_connection((host, int(port)), timeout=60))
        with contextlib.suppress(ConnectionError):  # the learner has closed it already
            say(lines[-1], chance)
        if len(lines) == at_once:
            lines.popleft().close()
    for line in lines:
        line.close()


def sink() -> None:
    """Accept every connection, read everything and never answer."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    selector.register(listener.accept()[0], selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket) and not _read(key.fileobj):
                    selector.unregister(key.fileobj)
                    key.fileobj.close()


def _read(line: socket.socket) -> bytes:
    with contextlib.suppress(ConnectionError):
        return line.recv(65536)
    return b""


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


if __name__ == "__main__":
    if sys.argv[1] == "sink":
        sink()
    else:
        address, kind, connections, at_once, seed, per_second = sys.argv[1:]
        flood(address, globals()[kind], int(connections), int(at_once), int(seed), float(per_second))
