"""A network of its own for some processes: nothing but a loopback, on which packets get lost as it is told."""

import itertools
import os
import shutil
import subprocess
from typing import Any

import pytest

NUMBERS = itertools.count()


class Namespace:
    """Without root, `ip` and `iptables` the test is skipped. Whoever starts processes in it ends them before."""

    def __init__(self) -> None:
        self._name = f"seedrl-{os.getpid()}-{next(NUMBERS)}"
        if os.geteuid() or not shutil.which("ip") or not shutil.which("iptables"):
            pytest.skip("needs root, ip and iptables (Debian, Ubuntu: apt-get install iproute2 iptables)")
        made = subprocess.run(["ip", "netns", "add", self._name], capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
        self._run("ip", "link", "set", "lo", "up")

    def __enter__(self) -> "Namespace":
        return self

    def __exit__(self, *_: Any) -> None:
        subprocess.run(["ip", "netns", "del", self._name], check=True)

    @property
    def prefix(self) -> list[str]:
        """Before a command, runs it here."""
        return ["ip", "netns", "exec", self._name]

    def lose(self, share: float) -> None:
        """Loses this share of all packets at random; 1 for all of them."""
        chance = ["-m", "statistic", "--mode", "random", "--probability", f"{share}"] if share < 1 else []
        self._run("iptables", "-A", "INPUT", "-p", "tcp", *chance, "-j", "DROP")

    def heal(self) -> None:
        self._run("iptables", "-F", "INPUT")

    def _run(self, *command: str) -> None:
        subprocess.run([*self.prefix, *command], check=True)
