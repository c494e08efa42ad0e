"""A pytest plugin: a test that leaves something behind fails, and the failure names the test and what it left.

After each test no thread, child process, signal handler, environment variable, directory or torch setting may differ
from before; after each file no process below this one and no listening socket. What ends by itself gets GRACE seconds.
The plugin knows nothing of learners and actors.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

import pytest

GRACE = 10.0  # seconds; waited for only by a test that has left something
MARK = "SEEDRL_TESTS"  # an environment variable that every process below this one inherits
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR1)
LISTENING = "0A"  # the state in /proc/net/tcp

# Python starts these once per process, on first use, and ends them when it exits.
ONCE_PER_PROCESS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
LIBRARY_THREADS = {
    "(_poll_wrapper)": "gRPC's asyncio has one poller per process, which ends with the last of its objects",
    "tqdm_monitor": "tqdm starts one per process, with its first bar",
}
NOT_OF_A_TEST = {
    "PYTEST_CURRENT_TEST": "pytest sets it for each test",
    "TORCHINDUCTOR_CACHE_DIR": "torch sets it when its first optimizer is made",
    **dict.fromkeys(
        ("MPLBACKEND", "MPLCONFIGDIR", "PYGAME_HIDE_SUPPORT_PROMPT"), "envpool sets it when it is imported"
    ),
    MARK: "it is set here",
}

Found = dict[Hashable, str]  # what exists now, and how to name it in a failure


def threads() -> Found:
    """Return Python's threads. A dummy stands for a thread of gRPC or torch that once called Python, and has no end."""
    return {
        thread: f"thread {thread.name!r}"
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread) and not thread.name.endswith(tuple(LIBRARY_THREADS))
    }


def children() -> Found:
    """Return the processes that this one has started and not waited for."""
    found: Found = {}
    for task in os.scandir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread has ended
            found |= {int(pid): "" for pid in Path(task.path, "children").read_text().split()}
    return {pid: f"child process {pid}" for pid in found}


def settings() -> Found:
    """Return what a process has only one of and tests share."""
    found: Found = {(name, value): f"{name}={value}" for name, value in os.environ.items() if name not in NOT_OF_A_TEST}
    found |= {(number, signal.getsignal(number)): f"a handler of {number.name}" for number in SIGNALS}
    found[os.getcwd()] = f"working directory {os.getcwd()}"
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_num_threads"):
        number = torch.get_num_threads()
        found["torch", number] = f"torch with {number} threads"
    return found


def descendants() -> Found:
    """Return the processes that inherited this process's mark, however many parents lie between."""
    mark = f"{MARK}={os.getpid()}\0".encode()
    found: Found = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and mark in _read(entry.path, "environ"):
            found[int(entry.name)] = f"process {entry.name}"
    return found


def sockets() -> Found:
    """Return the TCP sockets on which this process listens."""
    own = {os.readlink(entry.path) for entry in _files() if entry.is_symlink()}
    found: Found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _read(table).decode().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENING and f"socket:[{words[9]}]" in own:
                found[words[9]] = f"a socket that listens on port {int(words[1].rpartition(':')[2], 16)}"
    return found


OF_A_TEST = (threads, children, settings)
OF_A_FILE = (threads, children, descendants, sockets)


class Watch:
    """Remembers what exists when it is made. Belongs to the main thread."""

    def __init__(self, looks: tuple[Callable[[], Found], ...]) -> None:
        self._before = {look: look() for look in looks}

    def left(self) -> list[str]:
        """Return what exists now and did not before, once it has had time to end."""
        deadline = time.monotonic() + GRACE
        while (found := self._new()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    def _new(self) -> list[str]:
        found = []
        for look, before in self._before.items():
            now = look()
            found += [now[key] + _detail(key) for key in now.keys() - before.keys() if not _is_for_good(key)]
            if look is settings:
                found += [f"no {before[key]}" for key in before.keys() - now.keys()]
        return sorted(found)


def _is_for_good(key: Hashable) -> bool:
    return isinstance(key, int) and any(name in _command(key) for name in ONCE_PER_PROCESS)


def _detail(key: Hashable) -> str:
    """Return the command line of a process."""
    return f" ({_command(key) or 'ended, but not waited for'})" if isinstance(key, int) else ""


def _command(pid: int) -> str:
    return _read(f"/proc/{pid}", "cmdline").decode(errors="replace").replace("\0", " ").strip()


def _read(*path: str) -> bytes:
    """Return a file's content; nothing, if it is gone or somebody else's."""
    try:
        return Path(*path).read_bytes()
    except OSError:
        return b""


def _files() -> Iterator[os.DirEntry[str]]:
    with os.scandir("/proc/self/fd") as entries:
        yield from entries


def pytest_configure(config: pytest.Config) -> None:
    os.environ[MARK] = str(os.getpid())


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left_by_the_file(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from _guarded(request.node.nodeid, OF_A_FILE)


@pytest.fixture(autouse=True)
def _nothing_is_left_by_the_test(request: pytest.FixtureRequest) -> Iterator[None]:
    yield from _guarded(request.node.nodeid, OF_A_TEST)


def _guarded(name: str, looks: tuple[Callable[[], Found], ...]) -> Iterator[None]:
    watch = Watch(looks)
    yield
    if left := watch.left():
        pytest.fail(f"{name} left behind: {'; '.join(left)}", pytrace=False)
