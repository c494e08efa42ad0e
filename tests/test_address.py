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
        with pytest.raises(ConfigError, match=f"cannot listen on {listen}: the port is in use"):
            refuse_if_taken(listen)
    refuse_if_taken(listen)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", "[::1]:0"])
def test_address_that_is_free_is_not(listen: str) -> None:
    refuse_if_taken(listen)


@pytest.mark.parametrize("listen", ["203.0.113.7:1234", "no.such.host.invalid:1", "127.0.0.1", "127.0.0.1:http:"])
def test_address_that_is_not_of_this_machine_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        refuse_if_taken(listen)


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
