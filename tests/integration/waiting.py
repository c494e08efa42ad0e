"""Waits for conditions, never for a time; addresses that nothing else takes."""

import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DEADLINE = 120.0  # seconds, of every wait; reached only when something hangs, not on a machine with ten times its load
PAUSE = 0.01  # seconds between two looks


def eventually(condition: Callable[[], Any], seconds: float = DEADLINE) -> Any:
    """Return the first true value of `condition`; fail if there is none before the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not true after {seconds:g} s"
        time.sleep(PAUSE)
    return value


def settled(value: Callable[[], Any], seconds: float = 1.0) -> Any:
    """Return a value once it has not changed for some time."""
    seen, since = value(), time.monotonic()

    def is_unchanged() -> bool:
        nonlocal seen, since
        if value() != seen:
            seen, since = value(), time.monotonic()
        return time.monotonic() - since > seconds

    eventually(is_unchanged)
    return seen


def within(seconds: float, condition: Callable[[], Any]) -> float:
    """Wait for what is promised within `seconds`, and return how long it took.

    The promise is counted in pauses, not by the clock: where a pause takes long because the machine stood still, so did
    the process that is waited for. It has to be kept by far on an idle machine; `at_best` is for tight promises.
    """
    began = time.monotonic()
    for _ in range(round(seconds / PAUSE)):
        if condition():
            return time.monotonic() - began
        time.sleep(PAUSE)
    raise AssertionError(f"not true within {seconds:g} s")


def at_best(bound: float, measure: Callable[[], float], attempts: int = 8) -> float:
    """Return the first measurement within the bound. A busy machine spoils some attempts, a broken promise all."""
    seen: list[float] = []
    while len(seen) < attempts:
        seen.append(measure())
        if seen[-1] <= bound:
            return seen[-1]
    raise AssertionError(f"never within {bound:g}: {', '.join(f'{each:.3g}' for each in seen)}")


def free_address() -> str:
    """Return a loopback address for a server that starts later, or never; this process keeps it for itself.

    The port lies below those that the kernel gives to clients, and the claim on it is seen by every other test process,
    so nothing takes it between two servers of a test.
    """
    return f"127.0.0.1:{next(_ports)}"


def is_listening(address: str) -> bool:
    if address.startswith("unix:"):
        family, where = socket.AF_UNIX, address.removeprefix("unix:")
    else:
        family, where = socket.AF_INET, ("127.0.0.1", int(address.rpartition(":")[2]))
    with socket.socket(family) as probe:
        return probe.connect_ex(where) == 0


LOWEST_PORT = 12_000
_claims: list[socket.socket] = []  # held until this process ends


def _claimed_ports() -> Iterator[int]:
    """Yield ports that this process has claimed, each once; a process begins at a place of its own."""
    first_of_clients = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    count = first_of_clients - LOWEST_PORT
    for number in itertools.count(os.getpid() * 97):
        port = LOWEST_PORT + number % count
        if _claim(port):
            yield port


def _claim(port: int) -> bool:
    """Claim a port by a name in the kernel's table of abstract sockets, which ends with the process."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0seedrl-tests-port-{port}")
        with socket.socket() as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # a port whose last connections are closing is free
            probe.bind(("0.0.0.0", port))
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


_ports = _claimed_ports()
