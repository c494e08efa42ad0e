"""A program that runs a seedrl command as if this were not Linux: `python -m tests.elsewhere actor learner=…`.

It removes what Windows lacks, and macOS in part: modules, and names of os, signal and socket. Whatever uses one without
a fallback fails here as it would fail there.
"""

import os
import signal
import socket
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

MODULES = {"fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty", "_posixshmem"}
NAMES: dict[ModuleType, str] = {
    os: "fork geteuid getgid getloadavg getuid memfd_create register_at_fork sched_getaffinity sched_setaffinity",
    signal: "SIGALRM SIGCHLD SIGHUP SIGKILL SIGUSR1 SIGUSR2 pthread_sigmask setitimer",
    socket: "AF_UNIX",
}


class Missing:
    """Finds no module of those that only Unix has."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def leave_linux() -> None:
    sys.meta_path.insert(0, Missing())  # type: ignore[arg-type]
    for name in MODULES:
        sys.modules.pop(name, None)
    for module, names in NAMES.items():
        for name in names.split():
            delattr(module, name)


if __name__ == "__main__":
    leave_linux()
    from seedrl.commandline.main import main

    main()
