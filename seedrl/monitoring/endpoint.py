"""Serves a few pages over HTTP, for browsers and Prometheus. Knows nothing of their content, and reads no file.

Peers are not trusted: whatever they send, delay or keep open, they cost no more than `ASKING` connections whose request
has not arrived, `CONNECTIONS` that are answered, one answer per `TURN_SECONDS`, and the making of each page once per
`FRESH_SECONDS`. Nor can they starve the probes that ask for health: a client that is slow to ask makes way for the next
one, and probes have places and turns of their own.
"""

import asyncio
import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

from seedrl.errors import ConfigError

PROBES = ("/healthz", "/readyz")  # pages about the present moment
AUTO = "auto"
AUTO_HOST, AUTO_PORT = "127.0.0.1", 9464
ASKING = 64  # connections at once whose request has not arrived; a further one takes the place of the oldest
CONNECTIONS = 16  # at once that are answered; further ones are closed without an answer
HEAD_BYTES = 8192  # of a request line and its headers
REQUEST_SECONDS = 5.0  # for a client to send its request
CONNECTION_SECONDS = 20.0  # for all of it, answer included
LINGER_SECONDS = 1.0  # for a client to hang up, so that closing does not destroy the answer on its way
TURN_SECONDS = 0.02  # between two answers to any clients, except for probes
PROBE_TURN_SECONDS = 0.002  # between two answers to probes
FRESH_SECONDS = 0.2  # for which a page is not made again
RETRY_SECONDS = 1.0  # after a connection could not be accepted
STOP_SECONDS = 5.0  # for the thread to end; longer only if a page hangs

HTML_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


class Page(NamedTuple):
    content: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


class Endpoint:
    """Serves pages from a daemon thread, `metrics`, which also makes them. One thread calls `start`, then `stop`."""

    def __init__(
        self,
        listen: str,
        pages: Mapping[str, Callable[[], Page]],
        on_error: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        probes: Collection[str] = PROBES,
    ) -> None:
        """Pages are kept for a moment, except for the `probes`, which have to be cheap and are never starved."""
        self._listen = listen
        self._host, self._port = address_of(listen)
        self._names = {"localhost", self._host.lower(), socket.gethostname().lower()}
        self._pages = {
            path: _Kept(path, make, on_error, clock, 0.0 if path in probes else FRESH_SECONDS)
            for path, make in pages.items()
        }
        self._on_error = on_error
        self._is_private = True  # only this machine can reach it; others may ask by whatever name they know
        self._connections: set[asyncio.Task[None]] = set()
        self._asking: dict[asyncio.Task[None], None] = {}  # those whose request has not arrived, oldest first
        self._queue = _Queue(CONNECTIONS, TURN_SECONDS)
        self._probe_queues = dict.fromkeys(probes, _Queue(CONNECTIONS, PROBE_TURN_SECONDS))  # one queue, by path
        self._stopping = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Start serving; return the HOST:PORT."""
        listener = self._bind()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(listener, self._loop), name="metrics", daemon=True)
        host, port = listener.getsockname()[:2]
        self._is_private = ipaddress.ip_address(host).is_loopback
        self._thread.start()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def stop(self) -> None:
        """Close all connections. It may be called again, and without `start`."""
        if self._loop and self._thread:
            with contextlib.suppress(RuntimeError):  # the loop has ended before
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(STOP_SECONDS)

    def _bind(self) -> socket.socket:
        try:
            return bound(self._host, self._port)
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be one
            if self._listen == AUTO:  # another run on this machine has it
                return bound(self._host, 0)
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"metrics={self._listen} cannot be served on: {reason}; "
                "choose another HOST:PORT, or metrics=auto for any free port"
            ) from error

    # The rest runs in the thread.

    def _run(self, listener: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        loop.set_exception_handler(lambda _, context: self._on_error(f"metrics endpoint: {context['message']}"))
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        """Accept connections directly: asyncio's own server loses a connection that comes while it closes."""
        loop = asyncio.get_running_loop()
        with listener:
            listener.setblocking(False)
            loop.add_reader(listener, self._accept, loop, listener)
            await self._stopping.wait()
            loop.remove_reader(listener)
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, loop: asyncio.AbstractEventLoop, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # it has gone again
            return
        except OSError as error:  # no file descriptor left, most likely: it would be tried again and again at once
            self._on_error(f"metrics endpoint: {error}")
            loop.remove_reader(listener)
            loop.call_later(RETRY_SECONDS, loop.add_reader, listener, self._accept, loop, listener)
            return
        if len(self._asking) >= ASKING:
            next(iter(self._asking)).cancel()
        connection = loop.create_task(self._converse(client))
        self._connections.add(connection)
        self._asking[connection] = None
        connection.add_done_callback(lambda _: self._forget(connection, client))  # also if it never began

    def _forget(self, connection: asyncio.Task[None], client: socket.socket) -> None:
        self._connections.discard(connection)
        self._asking.pop(connection, None)
        client.close()

    async def _converse(self, client: socket.socket) -> None:
        """Answer one request. A client that disconnects or is too slow is ignored."""
        client.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=client, limit=HEAD_BYTES)
        try:
            async with asyncio.timeout(CONNECTION_SECONDS):
                request = await self._request(reader)
                queue = self._probe_queues.get(request.path, self._queue)
                with queue.place():
                    answer = self._answer(request)
                    await queue.turn()
                    writer.transport.set_write_buffer_limits(0)  # so that drain means: the kernel has all of it
                    writer.write(answer)
                    await writer.drain()
                    await _linger(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    async def _request(self, reader: asyncio.StreamReader) -> "_Request":
        """Read a request; from then on the connection makes way for no other."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _Request(refusal=_plain(431, f"A request has at most {HEAD_BYTES} bytes here."))
        finally:
            connection = asyncio.current_task()
            assert connection is not None
            self._asking.pop(connection, None)
        method, _, rest = head.decode("latin-1").partition(" ")
        target, _, rest = rest.partition(" ")
        version, *headers = rest.split("\r\n")
        if not version.startswith("HTTP/1."):
            return _Request(refusal=_plain(400, "This is not an HTTP/1 request."))
        return _Request(method, target.partition("?")[0], headers)

    def _answer(self, request: "_Request") -> bytes:
        page = request.refusal or self._page(request.method, request.path, request.headers)
        return _response(page, with_content=request.method != "HEAD")

    def _page(self, method: str, path: str, headers: Sequence[str]) -> Page:
        if self._is_private and not self._is_asked_for(headers):
            return _plain(421, "Ask for this by localhost, by IP address, or by the host named in metrics=HOST:PORT.")
        if method not in ("GET", "HEAD"):
            return _plain(405, "There is only GET and HEAD here.")
        if path not in self._pages:
            return _plain(404, f"There is no such page here. There is: {' '.join(self._pages)}")
        return self._pages[path].page()

    def _is_asked_for(self, headers: Sequence[str]) -> bool:
        """Return False for a foreign name: a web page may have pointed its own name at this machine to read along."""
        fields = (header.partition(":") for header in headers)
        hosts = [value.strip().lower() for name, _, value in fields if name.lower() == "host"]
        name = _without_port(hosts[0]) if len(hosts) == 1 else ""
        return name in self._names or _is_ip(name)


class _Request(NamedTuple):
    method: str = ""
    path: str = ""
    headers: Sequence[str] = ()
    refusal: Page | None = None  # the answer to bytes that are no request


class _Queue:
    """Bounds how many connections are answered at once, and how fast. Owned by the endpoint's thread."""

    def __init__(self, places: int, turn_seconds: float) -> None:
        self._free = places
        self._turn_seconds = turn_seconds
        self._next_turn = 0.0

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Hold one of the places; raise ConnectionAbortedError if none is free."""
        if not self._free:
            raise ConnectionAbortedError("too many connections are being answered")
        self._free -= 1
        try:
            yield
        finally:
            self._free += 1

    async def turn(self) -> None:
        """Space answers out: a flood of requests is slowed down, not paid for."""
        now = asyncio.get_running_loop().time()
        wait, self._next_turn = self._next_turn - now, max(self._next_turn, now) + self._turn_seconds
        if wait > 0:
            await asyncio.sleep(wait)


class _Kept:
    """One page, and its content while that is fresh. Owned by the endpoint's thread."""

    def __init__(
        self,
        path: str,
        make: Callable[[], Page],
        on_error: Callable[[str], None],
        clock: Callable[[], float],
        fresh_seconds: float,
    ) -> None:
        self._path = path
        self._make = make
        self._on_error = on_error
        self._clock = clock
        self._fresh_seconds = fresh_seconds
        self._page = Page(b"")
        self._fresh_until = float("-inf")
        self._is_broken = False

    def page(self) -> Page:
        if self._clock() >= self._fresh_until:
            self._page = self._made()
            self._fresh_until = self._clock() + self._fresh_seconds
        return self._page

    def _made(self) -> Page:
        try:
            page, self._is_broken = self._make(), False
        except Exception as error:
            page = _plain(500, "This page could not be made; the log of the process that serves it says why.")
            if not self._is_broken:  # reported once, not with every scrape
                self._on_error(f"page {self._path} failed: {type(error).__name__}: {error}")
            self._is_broken = True
        return page


def address_of(listen: str, setting: str = "metrics") -> tuple[str, int]:
    """Return host and port of a setting; an IPv6 address is written in brackets."""
    if listen == AUTO:
        return AUTO_HOST, AUTO_PORT
    host, _, port = listen.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    fits = (
        bare
        and not set(bare) & set('"/ ')
        and (":" not in host or host != bare)
        and port.isascii()
        and port.isdigit()
        and int(port) <= 65535
    )
    if not fits:
        raise ConfigError(f"{setting}={listen} is no address; give HOST:PORT such as 127.0.0.1:9464 or [::1]:9464")
    return bare, int(port)


def bound(host: str, port: int) -> socket.socket:
    """Return a socket on the first address of the host that can be bound."""
    error = OSError(f"{host} has no address")
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
        both = host == "::" and socket.has_dualstack_ipv6()
        try:
            return socket.create_server(address, family=family, dualstack_ipv6=both)
        except OSError as refused:
            error = refused
    raise error


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write_eof()
    async with asyncio.timeout(LINGER_SECONDS):
        while await reader.read(HEAD_BYTES):
            pass


def _plain(status: int, sentence: str) -> Page:
    return Page(f"{sentence}\n".encode(), status=status)


def _response(page: Page, with_content: bool = True) -> bytes:
    headers = [
        f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.content)}",
        "Cache-Control: no-store",
        "X-Content-Type-Options: nosniff",
        "Connection: close",
    ]
    if page.status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers.append("Allow: GET, HEAD")
    if page.content_type.startswith("text/html"):
        headers.append(f"Content-Security-Policy: {HTML_POLICY}")
    return "\r\n".join([*headers, "", ""]).encode("latin-1") + (page.content if with_content else b"")


def _without_port(host: str) -> str:
    """Return the name in a Host header; an IPv6 address has brackets."""
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
