"""The bad network does what it says: passes, delays, throttles, cuts, swallows."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.chaos.proxy import Proxy
from tests.integration.waiting import eventually, free_address


class Echo:
    """Answers with what it hears; `ended` connections have been closed by the other end."""

    def __init__(self) -> None:
        self.ended = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        threading.Thread(target=self._accept, name="echo", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), name="echo", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                while content := connection.recv(65536):
                    connection.sendall(content)
            except OSError:
                pass
        self.ended += 1

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(echo.address) as proxy:
        yield proxy


def connect(proxy: Proxy) -> socket.socket:
    host, _, port = proxy.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def ask(connection: socket.socket, content: bytes) -> bytes:
    connection.sendall(content)
    answer = b""
    while len(answer) < len(content):
        content_back = connection.recv(65536)
        if not content_back:
            raise ConnectionError("closed")
        answer += content_back
    return answer


def seconds_of(function: Any, *arguments: Any) -> float:
    began = time.monotonic()
    function(*arguments)
    return time.monotonic() - began


def test_proxy_passes_everything_on_in_order(proxy: Proxy) -> None:
    content = bytes(range(256)) * 1000
    with connect(proxy) as one, connect(proxy) as other:
        assert ask(one, content) == content
        assert ask(other, b"x") == b"x"
    assert proxy.accepted == 2


def test_proxy_delays_each_way_until_it_is_healed(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        proxy.delay = 0.1
        assert seconds_of(ask, connection, b"x") >= 0.2
        proxy.heal()
        assert ask(connection, b"y") == b"y"


def test_proxy_throttles_each_way(proxy: Proxy) -> None:
    with connect(proxy) as connection:
        proxy.bytes_per_second = 10_000.0
        assert seconds_of(ask, connection, bytes(1000)) >= 0.2


def test_cut_ends_both_ends_and_new_connections_work(proxy: Proxy, echo: Echo) -> None:
    with connect(proxy) as connection:
        ask(connection, b"x")
        proxy.cut()
        with pytest.raises(ConnectionError):
            ask(connection, b"y")
    eventually(lambda: echo.ended == 1)
    with connect(proxy) as connection:
        assert ask(connection, b"z") == b"z"


def test_black_hole_swallows_everything_even_the_end_and_new_connections_work(proxy: Proxy, echo: Echo) -> None:
    with connect(proxy) as lost, connect(proxy) as before:
        assert ask(lost, b"x") == ask(before, b"x")
        proxy.black_hole()
        with connect(proxy) as connection:
            assert ask(connection, b"y") == b"y"
            lost.settimeout(0.2)
            lost.sendall(b"z")
            with pytest.raises(TimeoutError):
                lost.recv(1)
            lost.close()
            assert ask(connection, b"y") == b"y"
    eventually(lambda: echo.ended == 1)  # that of the connection made since; the lost ones go on for the learner
    assert echo.ended == 1


def test_proxy_to_nobody_refuses(echo: Echo) -> None:
    with Proxy(free_address()) as proxy, connect(proxy) as connection, pytest.raises(ConnectionError):
        ask(connection, b"x")
