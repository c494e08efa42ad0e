"""One process of a job on the machine that Ray has chosen for it, as the child of a Ray actor.

It is a child process so that it has signals, an exit code, output and environment variables of its own, as everywhere
else, and shares neither libraries nor threads with Ray. Knows nothing of the job.
"""

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import ray

from seedrl.launching.children import LAST_WORDS, Process, start_module
from seedrl.run.context import LEARNER, ContextFile, State


class HostReady(NamedTuple):
    """A host that is ready, and what only its machine knows."""

    node: str  # Ray's id of its machine
    pid: int
    ports: list[int]  # free ones
    is_resumable: bool  # whether the run directory holds a checkpoint, as seen from there


class RayHost:
    """The body of a Ray actor, whose methods run in threads. Takes and returns plain strings and numbers only."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: Process | None = None
        self._starting = threading.Lock()

    def __repr__(self) -> str:
        """Return the name that Ray's logs use."""
        return self._name

    def report_ready(self, ports: list[int], run_directory: str) -> tuple[str, int, list[int], bool]:
        """Return the fields of a HostReady; the ports are those asked for if they are free, and others if not."""
        node = ray.get_runtime_context().get_node_id()
        is_resumable = any(Path(run_directory).glob("checkpoints/[0-9]*"))
        return (node, os.getpid(), free_ports(ports), is_resumable)

    def run(
        self, module: str, arguments: Sequence[str], variables: Mapping[str, str], directory: str, is_followed: bool
    ) -> Iterator[str | int]:
        """Yield the output of a process, line by line if it is followed, else its last line; then its exit code."""
        with self._starting:
            process = self._process = start_module(
                module,
                *arguments,
                orphaned=signal.SIGKILL,  # else it would keep the accelerator, port and lock of its successor
                env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
                cwd=directory if os.path.isdir(directory) else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        assert process.stdout is not None
        words = "it printed nothing"
        with process.stdout:
            for line in process.stdout:
                printed = line.decode(errors="replace").rstrip()
                if printed.startswith(LAST_WORDS) or not words.startswith(LAST_WORDS):  # a traceback may follow
                    words = printed
                print(printed, flush=True)  # into Ray's log of this host
                if is_followed:
                    yield printed
        if not is_followed:
            yield words
        yield process.wait()

    def desired_actors(self, run_directory: str) -> int:
        """Return how many actors its process could use, if that is a learner that trains in this directory; else 0."""
        context = ContextFile(Path(run_directory)).read_or_new()
        learner, process = context.members.get(LEARNER), self._process
        is_ours = learner is not None and process is not None and learner.pid == process.pid
        return context.desired_actors if is_ours and context.state is State.RUNNING else 0

    def stop(self, number: int) -> None:
        """Ask the process by a signal to end cleanly; a second call makes it end at once."""
        with self._starting, contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                self._process.send_signal(number)


def free_ports(wanted: Sequence[int]) -> list[int]:
    """Return as many free ports: the wanted ones where possible; 0 stands for any."""
    with contextlib.ExitStack() as open_ones:
        probes = [open_ones.enter_context(_probe(port)) for port in wanted]
        return [probe.getsockname()[1] for probe in probes]


def _probe(port: int) -> socket.socket:
    try:
        return socket.create_server(("", port))
    except OSError:
        return socket.create_server(("", 0))
