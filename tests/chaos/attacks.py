"""Attacks on a running learner, each with what it cost: memory, the rate of a healthy actor, and the log line.

python -m tests.chaos.attacks [TREE]    prints the table for the learner of another checkout, or of this one

The attacker and the healthy actor are those of this checkout, so two tables differ by the learner alone. Frames of
HTTP/2 are written by hand where no client library would send such things.
"""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np

from seedrl.wire import codec
from seedrl.wire.channel import client_options
from seedrl.wire.framing import READY, STEP, _varint, serialize
from tests.integration.processes import Commands, Process
from tests.integration.support import RawActor, make_rows
from tests.integration.waiting import DEADLINE, eventually, free_address, is_listening

ROOT = Path(__file__).parents[2]
MIB = 2**20
FLOOD_SECONDS = 8.0
LEAST_SECONDS = 3.0  # in which it is measured from the beginning of an attack
CALM_SECONDS = 4.0  # in which the healthy actor's rate is measured before an attack
STREAM = "/seedrl.v1.InferenceService/Stream"


class Outcome(NamedTuple):
    """The cost of an attack."""

    grew_mib: float  # at the worst moment
    calm: float  # requests of the healthy actor per second, before
    meanwhile: float  # and during the attack
    gap: float  # the most seconds between two of its answers, during the attack and until it has recovered
    log: str  # the newest line that names the attacker or its peer; empty for none
    seen: str = ""  # by the attacker

    @property
    def share(self) -> float:
        return self.meanwhile / self.calm

    def __str__(self) -> str:
        rates = f"{self.calm:.0f} → {self.meanwhile:.0f} requests/s ({self.share:.0%})"
        return f"+ {self.grew_mib:.0f} MiB; {rates}, longest gap {self.gap:.2f} s; {self.log or 'no log line'}"


class Healthy(NamedTuple):
    """The healthy actor so far."""

    requests: int = 0
    sessions: int = 0
    wrong: int = 0  # actions
    gap: int = 0  # milliseconds since the newest answer


class Victim:
    """A learner in a process of its own, with live pages, and a healthy actor that steps without end."""

    def __init__(self, commands: Commands, tree: Path = ROOT) -> None:
        self.address, self.pages = free_address(), free_address()
        settings = [f"listen={self.address}", "run_dir=run", "display=plain", f"metrics={self.pages}", "threads=1"]
        settings += ["model.name=tests.integration.support:OracleModel", "actors.envs=4", "serving.max_slots=64"]
        settings += ["algorithm.unroll_length=4", "stop.env_steps=1000000000"]
        self.process: Process = commands.start("learner", *settings, path=tree)
        eventually(lambda: is_listening(self.address))
        self._healthy = commands.start(self.address, module="tests.chaos.healthy", path=ROOT)
        self.goes_on()

    def healthy(self) -> Healthy:
        """Return what the healthy actor has printed last."""
        lines = self._healthy.out.rsplit("\n", 2)[:-1]
        return _healthy(lines[-1]) if lines and lines[-1] else Healthy()

    def _longest_gap(self, since: int) -> float:
        """Return the most seconds between two answers of the healthy actor, which has printed so much before."""
        return max(_healthy(line).gap for line in self._healthy.out[since:].split("\n")[:-1]) / 1000

    def goes_on(self, requests: int = 100) -> None:
        """Wait until the healthy actor has had some more answers, all of them right."""
        goal = self.healthy().requests + requests
        eventually(lambda: self.healthy().requests >= goal)
        assert not self.healthy().wrong

    def memory(self, field: str = "VmRSS") -> float:
        """Return MiB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{field}:"))

    def rate(self, seconds: float) -> float:
        before, began = self.healthy().requests, time.monotonic()
        time.sleep(seconds)
        return (self.healthy().requests - before) / (time.monotonic() - began)

    def under(self, attack: "Attack") -> Outcome:
        """Measure an attack, which returns what the attacker saw."""
        calm = self.rate(CALM_SECONDS)
        said, printed = len(self.process.out), self._healthy.out.rfind("\n") + 1
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")  # the highest begins again
        memory, before, began = self.memory(), self.healthy().requests, time.monotonic()
        seen = attack(self)
        time.sleep(max(0.0, began + LEAST_SECONDS - time.monotonic()))
        took, after = time.monotonic() - began, self.healthy().requests
        self.goes_on()
        lines = [line for line in self.process.out[said:].splitlines() if line.startswith("learner: ")]
        log = lines[-1].removeprefix("learner: ") if lines else ""
        gap = self._longest_gap(printed)
        return Outcome(self.memory("VmHWM") - memory, calm, (after - before) / took, gap, log, seen)


def _healthy(line: str) -> Healthy:
    return Healthy(*map(int, line.split()))


Attack = Callable[[Victim], str]


@contextlib.contextmanager
def victim(directory: Path, tree: Path = ROOT) -> Iterator[Victim]:
    with contextlib.closing(Commands(directory)) as commands:
        yield Victim(commands, tree)


# Messages of gRPC.


def sent(address: str, *messages: bytes, compression: grpc.Compression | None = None) -> str:
    """Send raw messages in a stream; return how the learner ended it."""
    with grpc.insecure_channel(address, options=client_options()) as channel:
        call = channel.stream_stream(STREAM)(iter(messages), timeout=DEADLINE, compression=compression)
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
        return f"{call.code().name}: {call.details()}"


def at_once(count: int, attack: Callable[[], str]) -> str:
    """Run an attack several times at the same time; return what the last one saw."""
    seen: list[str] = []
    threads = [threading.Thread(target=lambda: seen.append(attack())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen[-1]


def hello(name: str) -> bytes:
    return serialize(codec.encode_hello(codec.Hello(name)))


def empty_parts(tag: int, part: bytes, size: int) -> bytes:
    return bytes([tag]) + _varint(size // len(part) * len(part)) + part * (size // len(part))


def step_of_empty_blobs(victim: Victim) -> str:
    """60 MB of observations without content."""
    return sent(victim.address, hello("attacker"), empty_parts(STEP, b"\x1a\x00", 60_000_000))


def ready_of_tiny_leaves(victim: Victim) -> str:
    message = empty_parts(READY, b"\x0a\x00", 60_000_000)
    return [sent(victim.address, hello("attacker"), message) for _ in range(4)][-1]


def large_before_hello(victim: Victim) -> str:
    """Twelve at once, 60 MiB each."""
    step = serialize(codec.encode_step(1, make_rows())._replace(observation=[bytes(60 * MIB)]))
    return at_once(12, lambda: sent(victim.address, step))


def compressed(victim: Victim) -> str:
    """60 MiB of zeros, which are some kilobytes on the wire."""
    step = serialize(codec.encode_step(1, make_rows())._replace(observation=[bytes(60 * MIB)]))
    return sent(victim.address, hello("attacker"), step, compression=grpc.Compression.Gzip)


def absurd_observations(victim: Victim) -> str:
    return _absurd(victim, observation=np.full((4, 3), 1e20, np.float32))


def absurd_rewards(victim: Victim) -> str:
    return at_once(4, lambda: _absurd(victim, reward=np.full(4, 3e38, np.float32)))


def _absurd(victim: Victim, **changes: object) -> str:
    """Step like a good actor for a while, then send rows with such numbers until the session ends."""
    with RawActor(victim.address) as actor:
        actor.join(name="attacker")
        with contextlib.suppress(grpc.RpcError):
            for number in range(50):
                rows = make_rows(flags=0 if number else 4)
                actor.send(codec.encode_step(number, rows._replace(**changes) if number > 5 else rows))
                actor.receive()
            return "it was served"
        code, details = actor.status()
        return f"{code.name}: {details}"


# Frames of HTTP/2.

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS, PING, CONTINUATION = 1, 4, 6, 9
END_HEADERS = 4


def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content


def text(value: bytes) -> bytes:
    return bytes([len(value)]) + value


def field(number: int) -> bytes:
    """Return a header that is not indexed, with a name and a value of its own."""
    return b"\x00" + text(f"x-{number:06d}".encode()) + text(b"v" * 100)


# The headers of a call that gRPC would serve: POST, http, the path, the authority, the content type and te.
CALL = (
    *(b"\x83\x86", b"\x04" + text(STREAM.encode()), b"\x01" + text(b"localhost")),
    *(b"\x0f\x10" + text(b"application/grpc"), b"\x00" + text(b"te") + text(b"trailers")),
)
HEAD = frame(HEADERS, 0, 1, b"".join(CALL))


@contextlib.contextmanager
def line_to(address: str) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE) as line:
        line.settimeout(None)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 1, 0))  # seconds
        line.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
        reader = threading.Thread(target=_read_on, args=(line,))
        reader.start()
        try:
            yield line
        finally:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            reader.join()


def _read_on(line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while line.recv(65536):
            pass


def flooding(connect: Callable[[], contextlib.AbstractContextManager[socket.socket]], content: bytes) -> str:
    """Send the same bytes again and again, over new connections when one is closed."""
    deadline, connections = time.monotonic() + FLOOD_SECONDS, 0
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), connect() as line:
            connections += 1
            while time.monotonic() < deadline:
                line.sendall(content)
    return f"{connections} connections"


def continuation_flood(victim: Victim) -> str:
    """Headers that never end."""
    content = b"".join(frame(CONTINUATION, 0, 1, field(number) * 100) for number in range(10))

    @contextlib.contextmanager
    def begun() -> Iterator[socket.socket]:
        with line_to(victim.address) as line:
            line.sendall(HEAD)
            yield line

    return flooding(begun, content)


def large_headers(victim: Victim) -> str:
    """1 MiB of headers on each of eight connections."""
    parts = [frame(CONTINUATION, 0, 1, field(number) * 140) for number in range(66)]
    content = HEAD + b"".join(parts) + frame(CONTINUATION, END_HEADERS, 1, b"")
    with contextlib.ExitStack() as until_the_end:
        lines = [until_the_end.enter_context(line_to(victim.address)) for _ in range(8)]
        for line in lines:
            with contextlib.suppress(OSError):
                line.sendall(content)
        victim.rate(2.0)
    return ""


def ping_flood(victim: Victim) -> str:
    content = b"".join(frame(PING, 0, 0, number.to_bytes(8, "big")) for number in range(1000))
    return flooding(lambda: line_to(victim.address), content)


# Clients that are slow, or too eager.

SLEEPER = """
import sys
from tests.chaos.attacks import step_on
step_on(sys.argv[1], [tuple(word.split("=")) for word in sys.argv[2:]])
"""


def step_on(address: str, options: list[tuple[str, str]]) -> None:
    """Step until the session ends; print how."""
    channel = grpc.insecure_channel(address, options=[(name, int(value)) for name, value in options])
    with contextlib.closing(channel), RawActor(address, channel) as actor:
        actor.join(name="attacker")
        number = 0
        with contextlib.suppress(grpc.RpcError):
            while True:
                actor.send(codec.encode_step(number, make_rows(flags=0 if number else 4)))
                actor.receive()
                number += 1
                print(number, flush=True)
                time.sleep(0.5)
        print(*actor.status(), flush=True)


@contextlib.contextmanager
def stepping_client(victim: Victim, *options: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Start a client in a process of its own; yield it and what it prints, which grows."""
    command = [sys.executable, "-c", SLEEPER, victim.address, *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        printed: list[str] = []
        reader = threading.Thread(target=lambda out: printed.extend(out), args=(process.stdout,))
        reader.start()
        try:
            eventually(lambda: printed)
            yield process, printed
        finally:
            process.kill()
            reader.join()


def blocked_client(victim: Victim) -> str:
    """A client that answers nothing, not even a ping, for eight seconds, and then continues."""
    with stepping_client(victim) as (process, printed):
        os.kill(process.pid, signal.SIGSTOP)
        victim.rate(8.0)
        before = len(printed)
        os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: len(printed) > before + 2 or process.poll() is not None)
        return printed[-1].strip()


def eager_pings(victim: Victim) -> str:
    """A client that pings every two seconds."""
    options = ("grpc.keepalive_time_ms=2000", "grpc.http2.max_pings_without_data=0")
    with stepping_client(victim, *options) as (process, printed):
        victim.rate(15.0)
        eventually(lambda: not process.poll())
        return printed[-1].strip()


def slow_pages(victim: Victim) -> str:
    """Twenty clients that send half a request and connect again when they are hung up on; a probe asks meanwhile."""
    stopping = threading.Event()
    host, _, port = victim.pages.rpartition(":")

    def dawdle() -> None:
        while not stopping.is_set():
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=0.5) as line:
                line.sendall(b"GET /metrics HTTP/1.1\r\n")
                line.recv(1)

    threads = [threading.Thread(target=dawdle) for _ in range(20)]
    for thread in threads:
        thread.start()
    failed = sum(not _is_healthy(victim.pages) for _ in range(40))
    stopping.set()
    for thread in threads:
        thread.join()
    return f"{failed} of 40 probes failed"


def _is_healthy(pages: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://{pages}/healthz", timeout=1.0) as answer:
        return bool(answer.status == 200)
    return False


ATTACKS: tuple[Attack, ...] = (
    *(step_of_empty_blobs, ready_of_tiny_leaves, large_before_hello, compressed),
    *(blocked_client, eager_pings, slow_pages, ping_flood, large_headers, continuation_flood),
    *(absurd_observations, absurd_rewards),
)


def main(tree: Path, names: list[str]) -> None:
    print(f"{tree}, load {os.getloadavg()[0]:.0f}", flush=True)
    for attack in ATTACKS:
        if names and attack.__name__ not in names:
            continue
        with tempfile.TemporaryDirectory() as directory, victim(Path(directory), tree) as attacked:
            try:
                outcome = attacked.under(attack)
                print(f"{attack.__name__}: {outcome}; attacker saw {outcome.seen}", flush=True)
            except AssertionError as error:
                print(f"{attack.__name__}: {error}; learner says {attacked.process.out[-300:]}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT, sys.argv[2:])
