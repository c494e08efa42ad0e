"""Waiting for a condition, never for a time."""

import socket
import time
from collections.abc import Callable
from typing import Any

DEADLINE = 60.0  # of every wait; reached only when something hangs


def eventually(condition: Callable[[], Any], seconds: float = DEADLINE) -> Any:
    """The first true value of `condition`; fails if there is none before the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not true after {seconds:g} s"
        time.sleep(0.01)
    return value


def free_address() -> str:
    """An address nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def is_listening(address: str) -> bool:
    if address.startswith("unix:"):
        family, where = socket.AF_UNIX, address.removeprefix("unix:")
    else:
        family, where = socket.AF_INET, ("127.0.0.1", int(address.rpartition(":")[2]))
    with socket.socket(family) as probe:
        return probe.connect_ex(where) == 0
