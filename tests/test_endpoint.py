"""The HTTP endpoint: what it serves, to whom, and what slow, greedy and hostile clients can do to it."""

import gc
import http.client
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

import pytest

from seedrl.errors import ConfigError
from seedrl.monitoring import endpoint as module
from seedrl.monitoring.endpoint import Endpoint, Page, address_of
from tests.integration.waiting import DEADLINE, eventually, free_address

Reply = tuple[int, dict[str, str], bytes]


class Clock:
    """Time that passes when a test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Site:
    """An endpoint with a counting page, a broken one and HTML; everything opened is closed after the test."""

    def __init__(self) -> None:
        self.made = 0
        self.errors: list[str] = []
        self.clock = Clock()
        self._open = ExitStack()
        self.host, self.port = "", 0

    def start(self, listen: str = "127.0.0.1:0", **more: Callable[[], Page]) -> str:
        pages = {"/": self._html, "/count": self._count, "/broken": self._broken}
        pages |= {f"/{name}": make for name, make in more.items()}
        endpoint = Endpoint(listen, pages, self.errors.append, self.clock)
        address = endpoint.start()
        self._open.callback(endpoint.stop)
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        return address

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Reply:
        client = http.client.HTTPConnection(self.host.strip("[]"), self.port, timeout=DEADLINE)
        try:
            client.request(method, path, body, headers)
            reply = client.getresponse()
            return reply.status, dict(reply.getheaders()), reply.read()
        finally:
            client.close()

    def connect(self) -> socket.socket:
        client = socket.create_connection((self.host.strip("[]"), self.port), timeout=DEADLINE)
        return self._open.enter_context(client)

    def close(self) -> None:
        self._open.close()

    def _html(self) -> Page:
        return Page(b"<p>hello</p>", "text/html; charset=utf-8")

    def _count(self) -> Page:
        self.made += 1
        return Page(str(self.made).encode())

    def _broken(self) -> Page:
        raise ValueError("secret")


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    made.close()


def received(client: socket.socket) -> bytes:
    """Everything until the other end hangs up, however it does that."""
    content = b""
    try:
        while chunk := client.recv(65536):
            content += chunk
    except ConnectionError:
        pass
    return content


def said(site: Site, request: bytes) -> bytes:
    client = site.connect()
    client.sendall(request)
    return received(client)


# Pages


def test_page_is_served_with_its_type_and_never_cached(site: Site) -> None:
    site.start(table=lambda: Page(b"{}", "application/json"))
    status, headers, content = site.ask("/table?from=1&to=2")
    assert (status, content) == (200, b"{}")
    assert headers["Content-Type"] == "application/json"
    assert headers["Content-Length"] == "2"
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Content-Security-Policy" not in headers


def test_page_of_html_may_load_nothing_from_elsewhere(site: Site) -> None:
    site.start()
    _, headers, _ = site.ask("/")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; ")
    assert "connect-src 'self'" in headers["Content-Security-Policy"]


def test_page_status_is_its_own(site: Site) -> None:
    site.start(healthz=lambda: Page(b"draining", status=503))
    assert site.ask("/healthz")[0] == 503


def test_page_is_made_in_the_thread_named_metrics(site: Site) -> None:
    site.start(thread=lambda: Page(threading.current_thread().name.encode()))
    assert site.ask("/thread")[2] == b"metrics"


def test_page_is_not_made_again_while_it_is_fresh(site: Site) -> None:
    site.start()
    assert {site.ask("/count")[2] for _ in range(5)} == {b"1"}
    site.clock.now += module.FRESH_SECONDS
    assert {site.ask("/count")[2] for _ in range(5)} == {b"2"}


def test_large_page_arrives_whole(site: Site) -> None:
    content = os.urandom(8 << 20)
    site.start(large=lambda: Page(content))
    assert site.ask("/large")[2] == content


def test_head_has_the_headers_of_get_and_no_content(site: Site) -> None:
    site.start()
    reply = said(site, b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    head, _, content = reply.partition(b"\r\n\r\n")
    assert content == b""
    assert head == said(site, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").partition(b"\r\n\r\n")[0]


def test_endpoint_is_read_by_a_plain_client(site: Site) -> None:
    with urlopen(f"http://{site.start()}/", timeout=DEADLINE) as reply:
        assert reply.read() == b"<p>hello</p>"


# Requests that are refused


@pytest.mark.parametrize("path", ["/nothing", "//", "/count/", "/../count", "/%2e%2e/etc/passwd", "*"])
def test_unknown_path_is_told_which_pages_there_are(site: Site, path: str) -> None:
    site.start()
    status, _, content = site.ask(path)
    assert status == 404
    assert content == b"There is no such page here. There is: / /count /broken\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "get", "BREW"])
def test_other_method_is_refused_even_with_a_body(site: Site, method: str) -> None:
    site.start()
    status, headers, _ = site.ask("/count", method, body=b"x" * 200_000)
    assert (status, headers["Allow"], site.made) == (405, "GET, HEAD", 0)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "10.1.2.3:9464", "[::1]:9464", "[fe80::1]"])
def test_host_that_no_web_page_can_pretend_is_served(site: Site, host: str) -> None:
    site.start()
    assert site.ask("/count", Host=host)[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9464", "localhost.evil.example", "", "[", "127.0.0.1.x"]
)
def test_host_of_a_stranger_is_refused(site: Site, host: str) -> None:
    site.start()
    status, _, content = site.ask("/count", Host=host)
    assert (status, site.made) == (421, 0)
    assert b"metrics=HOST:PORT" in content


def test_host_given_never_or_twice_is_refused(site: Site) -> None:
    site.start()
    assert b" 421 " in said(site, b"GET /count HTTP/1.1\r\n\r\n")
    assert b" 421 " in said(site, b"GET /count HTTP/1.1\r\nHost: localhost\r\nhost: evil\r\n\r\n")


def test_host_it_listens_on_is_served(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, port, **_: [(socket.AF_INET, 0, 0, "", ("127.0.0.1", port))]
    )
    site.start("trainer.example:0")
    monkeypatch.undo()
    assert site.ask("/count", Host="Trainer.example:9464")[0] == 200


@pytest.mark.parametrize("request_line", [b"GET /count", b"\x00\xff\xfe", b"GET /count SPDY/3", b""])
def test_bytes_that_are_no_request_are_refused(site: Site, request_line: bytes) -> None:
    site.start()
    assert said(site, request_line + b"\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_request_that_does_not_end_is_refused(site: Site) -> None:
    site.start()
    endless = b"GET /count HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * module.HEAD_BYTES
    assert b" 431 " in said(site, endless)


# Pages that fail


def test_broken_page_tells_its_process_and_not_its_peer(site: Site) -> None:
    site.start()
    status, _, content = site.ask("/broken")
    assert status == 500
    assert b"secret" not in content
    assert site.errors == ["page /broken failed: ValueError: secret"]


def test_broken_page_is_told_once_until_it_has_worked_again(site: Site) -> None:
    failing = [True, True, False, True]

    def moody() -> Page:
        if failing.pop(0):
            raise ValueError(len(failing))
        return Page(b"")

    site.start(moody=moody)
    statuses = []
    for _ in range(4):
        statuses.append(site.ask("/moody")[0])
        site.clock.now += module.FRESH_SECONDS
    assert statuses == [500, 500, 200, 500]
    assert len(site.errors) == 2


def test_broken_page_leaves_the_others_alone(site: Site) -> None:
    site.start()
    site.ask("/broken")
    assert site.ask("/count")[0] == 200


def test_nothing_is_printed(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    site.start()
    site.ask("/broken")
    site.ask("/nothing")
    said(site, b"\r\n\r\n")
    site.connect().close()
    site.close()
    assert capfd.readouterr() == ("", "")


# Addresses


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("auto", ("127.0.0.1", 9464)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),
        ("trainer.example:0", ("trainer.example", 0)),
        ("[::1]:9464", ("::1", 9464)),
    ],
)
def test_address_is_read(listen: str, address: tuple[str, int]) -> None:
    assert address_of(listen) == address


@pytest.mark.parametrize(
    "listen", ["", "localhost", ":9464", "9464", "localhost:", "a:-1", "a:65536", "a:9²", "::1:9464", "[]:1", "a:0x1"]
)
def test_address_that_is_none_is_refused_with_the_setting(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"^metrics=.* is no address; give HOST:PORT"):
        Endpoint(listen, {})


def test_start_returns_the_address_bound(site: Site) -> None:
    address = free_address()
    assert site.start(address) == address


def test_start_on_ipv6_works(site: Site) -> None:
    try:
        address = site.start("[::1]:0")
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    assert address.startswith("[::1]:")
    assert site.ask("/count")[0] == 200


def test_start_on_a_taken_address_names_it_and_the_setting(site: Site) -> None:
    address = site.start()
    with pytest.raises(ConfigError, match=f"metrics={address} cannot be served on: .*in use.*metrics=auto"):
        Endpoint(address, {}).start()


@pytest.mark.parametrize("listen", ["192.0.2.1:9464", "no.such.name.invalid:1", "a..b:1"])
def test_start_on_an_address_of_elsewhere_names_it(listen: str) -> None:
    with pytest.raises(ConfigError, match=f"metrics={listen} cannot be served on"):
        Endpoint(listen, {}).start()


def test_auto_takes_its_port_and_another_one_when_that_is_taken(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AUTO_PORT", int(free_address().rpartition(":")[2]))
    assert site.start("auto") == f"127.0.0.1:{module.AUTO_PORT}"
    second = site.start("auto")
    assert second.startswith("127.0.0.1:")
    assert second != f"127.0.0.1:{module.AUTO_PORT}"
    assert site.ask("/count")[0] == 200


# Slow, greedy and hostile clients


def test_silent_client_is_hung_up_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """C12: slow scrapers do not hurt."""
    monkeypatch.setattr(module, "REQUEST_SECONDS", 0.05)
    site.start()
    assert received(site.connect()) == b""


def test_dripping_client_is_hung_up_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """C12: slow scrapers do not hurt."""
    monkeypatch.setattr(module, "REQUEST_SECONDS", 0.1)
    site.start()
    client = site.connect()

    def drip() -> bool:
        try:
            client.sendall(b"x")
        except ConnectionError:
            return True
        return False

    eventually(drip)


def test_client_that_does_not_read_is_hung_up_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """C12: slow scrapers do not hurt."""
    monkeypatch.setattr(module, "CONNECTION_SECONDS", 0.2)
    content = bytes(64 << 20)
    site.start(large=lambda: Page(content))
    client = site.connect()
    client.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert len(received(client)) < len(content)
    assert is_served(site)


def is_served(site: Site) -> bool:
    try:
        return site.ask("/count")[0] == 200
    except (http.client.HTTPException, ConnectionError):
        return False


def test_client_that_goes_away_costs_nothing(site: Site) -> None:
    """C12: slow scrapers do not hurt."""
    content = bytes(8 << 20)
    site.start(large=lambda: Page(content))
    for _ in range(2 * module.CONNECTIONS):
        with socket.create_connection((site.host, site.port), timeout=DEADLINE) as client:
            client.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
    eventually(lambda: is_served(site))
    assert site.errors == []


def test_connections_that_ask_for_nothing_make_way_for_the_next_one_oldest_first(site: Site) -> None:
    """C12: slow clients do not hurt."""
    site.start()
    held = [site.connect() for _ in range(module.ASKING)]
    assert site.ask("/count")[0] == 200
    assert received(held[0]) == b""
    held[3].sendall(b"GET /count HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert received(held[3]).startswith(b"HTTP/1.1 200 ")


def test_requests_beyond_the_limit_are_closed_at_once_and_probes_are_answered(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12: a client that does not read its answer keeps its place, but not that of a probe."""
    monkeypatch.setattr(module, "TURN_SECONDS", 0.0)
    content = bytes(8 << 20)
    site.start(large=lambda: Page(content), healthz=lambda: Page(b"alive"))
    held = [site.connect() for _ in range(module.CONNECTIONS)]
    for client in held:
        client.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(8)
    assert said(site, b"GET /count HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
    assert [site.ask("/healthz")[2] for _ in range(20)] == [b"alive"] * 20
    held[3].close()
    eventually(lambda: is_served(site))


def test_probes_are_answered_while_slow_clients_hold_on_and_connect_again(site: Site) -> None:
    """C12: 40 of 40 probes failed while 20 clients sent half a request each and connected again when hung up on."""
    site.start(healthz=lambda: Page(b"alive"))
    stopping = threading.Event()

    def dawdle() -> None:
        while not stopping.is_set():
            clients = [socket.create_connection((site.host, site.port), timeout=DEADLINE) for _ in range(20)]
            for client in clients:
                client.sendall(b"GET /count HTTP/1.1\r\n")
            for client in clients:
                client.close()

    threads = [threading.Thread(target=dawdle) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        assert [site.ask("/healthz")[2] for _ in range(40)] == [b"alive"] * 40
    finally:
        stopping.set()
        for thread in threads:
            thread.join(DEADLINE)


def test_probe_never_waits_for_the_turn_of_another_page(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_SECONDS", DEADLINE)
    site.start(readyz=lambda: Page(b"ready"))
    assert site.ask("/count")[0] == 200
    assert [site.ask("/readyz")[2] for _ in range(3)] == [b"ready"] * 3


def test_flood_makes_a_page_once_and_serves_everybody(site: Site) -> None:
    """C12: slow scrapers do not hurt."""
    site.start()
    replies = []
    threads = [
        threading.Thread(target=lambda: replies.extend(site.ask("/count")[2] for _ in range(10)))
        for _ in range(module.CONNECTIONS // 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert replies == [b"1"] * 10 * (module.CONNECTIONS // 2)
    assert site.made == 1


def test_answers_are_spaced_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two clients waits for its turn, which here never comes."""
    monkeypatch.setattr(module, "TURN_SECONDS", DEADLINE)
    monkeypatch.setattr(module, "CONNECTION_SECONDS", 0.1)
    site.start()
    assert site.ask("/count")[0] == 200
    assert said(site, b"GET /count HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""


def test_endpoint_without_descriptors_tries_again_later(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    site.start()
    client = site.connect()
    client.sendall(b"GET /count HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert received(client)
    probe = os.dup(0)
    os.close(probe)
    client = socket.socket()
    client.settimeout(DEADLINE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe + 1, hard))
    try:
        client.connect((site.host, site.port))
        eventually(lambda: site.errors)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with client:
        client.sendall(b"GET /count HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert received(client).startswith(b"HTTP/1.1 200 ")
    assert set(site.errors) == {"metrics endpoint: [Errno 24] Too many open files"}


# The end


def descriptors() -> set[str]:
    links = (Path(entry) for entry in os.scandir("/proc/self/fd"))
    return {str(link.readlink()) for link in links if link.is_symlink()}


def metrics_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "metrics"]


def test_stop_hangs_up_and_leaves_no_thread_and_no_socket(site: Site) -> None:
    gc.collect()
    before = descriptors()
    endpoint = Endpoint("127.0.0.1:0", {"/large": lambda: Page(bytes(8 << 20))})
    host, _, port = endpoint.start().rpartition(":")
    clients = [socket.create_connection((host, int(port)), timeout=DEADLINE) for _ in range(module.CONNECTIONS + 4)]
    clients[0].sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert clients[0].recv(8)
    assert [thread.daemon for thread in metrics_threads()] == [True]
    endpoint.stop()
    assert metrics_threads() == []
    for client in clients:
        received(client)
        client.close()
    assert descriptors() <= before
    with pytest.raises(ConnectionError):
        socket.create_connection((host, int(port)), timeout=DEADLINE)


def test_stop_works_twice_and_without_start(site: Site) -> None:
    endpoint = Endpoint("127.0.0.1:0", {})
    endpoint.stop()
    endpoint.start()
    endpoint.stop()
    endpoint.stop()
    assert metrics_threads() == []


def test_stop_does_not_wait_for_a_page_that_hangs(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_SECONDS", 0.05)
    asked, go_on = threading.Event(), threading.Event()

    def hang() -> Page:
        asked.set()
        go_on.wait(DEADLINE)
        return Page(b"")

    endpoint = Endpoint("127.0.0.1:0", {"/hang": hang})
    host, _, port = endpoint.start().rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as client:
        client.sendall(b"GET /hang HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert asked.wait(DEADLINE)
        endpoint.stop()
        assert metrics_threads()
        go_on.set()
        received(client)
    eventually(lambda: not metrics_threads())
