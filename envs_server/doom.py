"""A working directory for ViZDoom's engines, which leave files where they are started and do not end by themselves.

envpool starts an engine per environment with `vzd_path`; here that is a script which first changes into a temporary
directory. The engines write `_vizdoom.ini` and `_vizdoom/` there, and by it they are found and ended, because envpool
does not end them. Knows nothing of pools.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

PREFIX = "seedrl-doom-"  # followed by the id of the process that owns the directory
PROCESSES = Path("/proc")  # where Linux tells of all processes; elsewhere no engine is found


class EngineDirectory:
    """A temporary directory with the script in it. Owned by the pool that starts the engines."""

    def __init__(self, engine: str) -> None:
        remove_abandoned(Path(tempfile.gettempdir()))
        path = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
        self.remove = weakref.finalize(self, remove_with_engines, path)  # at the latest at exit
        script = Path(path) / "vizdoom"
        script.write_text(f'#!/bin/sh\ncd {shlex.quote(path)} && exec {shlex.quote(engine)} "$@"\n')
        script.chmod(0o700)
        self.vzd_path = str(script)


def remove_with_engines(path: str) -> None:
    """End the engines that run in a directory, and remove it."""
    for process in running_in(path):
        with contextlib.suppress(OSError):  # it has ended
            os.kill(process, signal.SIGKILL)
    shutil.rmtree(path, ignore_errors=True)


def remove_abandoned(parent: Path) -> None:
    """Remove the directories of processes that were killed before they could do so themselves."""
    for path in parent.glob(f"{PREFIX}*"):
        owner = re.match(rf"{PREFIX}(\d+)-", path.name)
        if owner and path.stat().st_uid == os.getuid() and not _exists(int(owner[1])):
            remove_with_engines(str(path))


def running_in(path: str) -> Iterator[int]:
    """Yield the ids of the processes whose working directory this is."""
    for process in PROCESSES.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if os.readlink(process / "cwd") == os.path.realpath(path):
                yield int(process.name)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True
