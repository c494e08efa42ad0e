"""One process of a job, run on the machine that Ray has chosen, as the child of a Ray actor.

A child of its own, because a process of ours has its signals, its exit code, its output and its environment variables
for itself, as everywhere else; and whatever either of the two does, the other's libraries and threads are elsewhere.
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

from seedrl.launching.children import Process, start_module
from seedrl.run.context import LEARNER, ContextFile, State


class Arrival(NamedTuple):
    """A host that is there, and what only its machine can tell."""

    node: str  # Ray's id of it
    pid: int
    ports: list[int]  # free ones
    is_resumable: bool  # whether the run directory holds a checkpoint, as seen from there


class Host:
    """The body of a Ray actor, whose methods run in threads. Takes and gives plain strings and numbers only."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process: Process | None = None
        self._starting = threading.Lock()

    def __repr__(self) -> str:
        """As Ray's logs call it."""
        return self._name

    def arrive(self, ports: list[int], run_directory: str) -> tuple[str, int, list[int], bool]:
        """The fields of an Arrival; with the ports that are asked for if they are free, with others if not."""
        node = ray.get_runtime_context().get_node_id()
        is_resumable = any(Path(run_directory).glob("checkpoints/[0-9]*"))
        return (node, os.getpid(), free_ports(ports), is_resumable)

    def run(
        self, module: str, arguments: Sequence[str], variables: Mapping[str, str], directory: str, is_followed: bool
    ) -> Iterator[str | int]:
        """What the process says, line by line if it is followed, else its last words; and at last its exit code."""
        with self._starting:
            process = self._process = start_module(
                module,
                *arguments,
                orphaned=signal.SIGKILL,  # or it would keep what Ray gives to its successor: accelerator, port, lock
                env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
                cwd=directory if os.path.isdir(directory) else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        assert process.stdout is not None
        words = "it said nothing"
        with process.stdout:
            for line in process.stdout:
                words = line.decode(errors="replace").rstrip()
                print(words, flush=True)  # into Ray's own log of this host
                if is_followed:
                    yield words
        if not is_followed:
            yield words
        yield process.wait()

    def desired_actors(self, run_directory: str) -> int:
        """That its process could use, if that is a learner which trains in this directory; else 0."""
        context = ContextFile(Path(run_directory)).read_or_new()
        learner, process = context.members.get(LEARNER), self._process
        is_ours = learner is not None and process is not None and learner.pid == process.pid
        return context.desired_actors if is_ours and context.state is State.RUNNING else 0

    def stop(self) -> None:
        """Asks the process to end in order; once more to end at once."""
        with self._starting, contextlib.suppress(ProcessLookupError):
            if self._process is not None:
                self._process.terminate()


def free_ports(wanted: Sequence[int]) -> list[int]:
    """As many; 0 stands for any."""
    with contextlib.ExitStack() as open_ones:
        probes = [open_ones.enter_context(_probe(port)) for port in wanted]
        return [probe.getsockname()[1] for probe in probes]


def _probe(port: int) -> socket.socket:
    try:
        return socket.create_server(("", port))
    except OSError:
        return socket.create_server(("", 0))
