"""Addresses to listen on: those of further ranks, and whether one is free. Knows nothing of gRPC."""

import socket

from seedrl.errors import ConfigError

UNIX = "unix:"


def address_of_rank(address: str, rank: int) -> str:
    """Return the address of a rank from that of rank 0: the next port, PATH.1 and so on; port 0 stays 0."""
    if address.startswith(UNIX):
        return f"{address}.{rank}" if rank else address
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}" if port.isdigit() and int(port) else address


def refuse_if_taken(address: str, setting: str = "listen") -> None:
    """Raise ConfigError if a server could not listen there. A socket file that a dead process left does not matter."""
    try:
        if address.startswith(UNIX):
            _check_socket_file(address.removeprefix(UNIX))
        else:
            _check_port(address)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot listen on {address}: the port is in use or the address is not one of this machine; set {setting}=…"
        ) from error


def _check_socket_file(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == 0:
            raise OSError("a process answers there")


def _check_port(address: str) -> None:
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]") or None, int(port), type=socket.SOCK_STREAM)
    family, _, _, _, where = found[0]
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
