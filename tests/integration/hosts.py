"""Hosts of a small network: network namespaces, each with an address of its own on a common bridge."""

import itertools
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NUMBERS = itertools.count()


class Hosts:
    """The hosts of one test. It is skipped without root and `ip`; processes on hosts have to end before `close`."""

    def __init__(self, count: int) -> None:
        if os.geteuid() or not shutil.which("ip"):
            pytest.skip("needs root and ip (Debian, Ubuntu: apt-get install iproute2)")
        mark = f"{os.getpid() % 50_000:x}{next(NUMBERS)}"
        self._names = [f"seedrl-{mark}-{number}" for number in range(count)]
        self.addresses = [f"10.77.7.{number + 1}" for number in range(count)]
        self._made: list[str] = []
        for name in self._names:
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
            if made.returncode:
                self.close()
                pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
            self._made.append(name)
        self._connect(mark)

    def _connect(self, mark: str) -> None:
        """Make the bridge on the first host and connect the others to it."""
        first = self._names[0]
        _ip("-n", first, "link", "add", "bridge", "type", "bridge")
        _ip("-n", first, "addr", "add", f"{self.addresses[0]}/24", "dev", "bridge")
        _ip("-n", first, "link", "set", "bridge", "up")
        for number, (name, address) in enumerate(zip(self._names, self.addresses, strict=True)):
            _ip("-n", name, "link", "set", "lo", "up")
            if number:
                near, far = f"p{mark}{number}", f"q{mark}{number}"
                _ip("link", "add", near, "netns", name, "type", "veth", "peer", "name", far, "netns", first)
                _ip("-n", first, "link", "set", far, "master", "bridge", "up")
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", near)
                _ip("-n", name, "link", "set", near, "up")

    def on(self, number: int, command: list[str]) -> list[str]:
        """Return the command line that runs a command on a host."""
        return ["ip", "netns", "exec", self._names[number], *command]

    def close(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=True)

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
