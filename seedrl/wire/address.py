"""Addresses to listen on: those of further ranks, and whether one is free. Knows nothing of gRPC."""

import errno
import socket

from seedrl.errors import ConfigError, require

UNIX = "unix:"
LAST_PORT = 65535


def address_of_rank(address: str, rank: int) -> str:
    """Return the address of a rank from that of rank 0: the next port, PATH.1 and so on; port 0 stays 0."""
    if address.startswith(UNIX):
        return f"{address}.{rank}" if rank else address
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + rank}" if port.isdigit() and int(port) else address


def check_address(setting: str, address: str) -> None:
    """Refuse an address that lacks its host or port."""
    host, _, port = address.rpartition(":")
    is_complete = bool(address.removeprefix(UNIX)) if address.startswith(UNIX) else bool(host) and port.isdigit()
    require(is_complete, f"{setting}={address} must be HOST:PORT or unix:PATH{_example(setting, host, port)}")
    require(address.startswith(UNIX) or int(port) <= LAST_PORT, f"{setting}={address}: a port is at most {LAST_PORT}")


def _example(setting: str, host: str, port: str) -> str:
    """Return an address that has a port, for one that has none."""
    if port.isdigit() or host:
        return ""
    return f", such as {setting}={port or '127.0.0.1'}:50051"


def refuse_if_taken(address: str, setting: str = "listen") -> None:
    """Raise ConfigError if a server could not listen there. A socket file that a dead process left does not matter."""
    check_address(setting, address)
    try:
        if address.startswith(UNIX):
            _check_socket_file(address.removeprefix(UNIX))
        else:
            _check_port(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {_reason(error, address)}; set {setting}=…") from error


def _reason(error: OSError, address: str) -> str:
    """Return why a process cannot listen on an address, and what to do about it."""
    host, _, port = address.rpartition(":")
    if isinstance(error, socket.gaierror):
        return f"there is no host {host}"
    if error.errno == errno.EADDRINUSE:
        return f"another process uses {'the socket' if address.startswith(UNIX) else f'port {port}'}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine (0.0.0.0 is all that it has)"
    if error.errno == errno.EACCES:
        return "permission denied" + (" (ports below 1024 need root)" if port.isdigit() else "")
    return error.strerror or str(error)


def _check_socket_file(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(path) == 0:
            raise OSError(errno.EADDRINUSE, "a process answers there")


def _check_port(address: str) -> None:
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]") or None, int(port), type=socket.SOCK_STREAM)
    family, _, _, _, where = found[0]
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
