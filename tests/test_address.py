"""C11: an address that somebody listens on is refused by name, before anything else is begun."""

import socket
from pathlib import Path

import pytest

from seedrl.errors import ConfigError
from seedrl.wire.address import refuse_if_taken


@pytest.fixture
def unix_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)  # such paths must be short
    return "learner.sock"


def test_address_with_a_listener_is_refused_by_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen on {listen}: another process uses port"):
            refuse_if_taken(listen)
    refuse_if_taken(listen)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", "[::1]:0"])
def test_address_that_is_free_is_not(listen: str) -> None:
    refuse_if_taken(listen)


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("203.0.113.7:1234", "cannot listen on 203.0.113.7:1234: 203.0.113.7 is not an address of this machine"),
        ("no.such.host.invalid:1", "cannot listen on no.such.host.invalid:1: there is no host no.such.host.invalid"),
        ("127.0.0.1", "listen=127.0.0.1 must be HOST:PORT or unix:PATH, such as listen=127.0.0.1:50051"),
        ("127.0.0.1:http:", "listen=127.0.0.1:http: must be HOST:PORT or unix:PATH"),
        ("127.0.0.1:70000", "listen=127.0.0.1:70000: a port is at most 65535"),
        ("unix:", "listen=unix: must be HOST:PORT or unix:PATH"),
    ],
)
def test_address_that_cannot_be_listened_on_is_refused_with_the_reason(listen: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        refuse_if_taken(listen)
    assert str(refusal.value).startswith(words)


def test_address_of_a_socket_file_with_a_listener_is_refused(unix_socket: str) -> None:
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(unix_socket)
        taken.listen()
        with pytest.raises(ConfigError, match=f"cannot listen on unix:{unix_socket}"):
            refuse_if_taken(f"unix:{unix_socket}")


def test_address_of_a_socket_file_that_a_dead_process_left_is_no_hindrance(unix_socket: str) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(unix_socket)
    assert Path(unix_socket).exists()
    refuse_if_taken(f"unix:{unix_socket}")
