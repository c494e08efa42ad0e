"""Memory shared by both ends: only with the right peer, never out of bounds, nothing left behind."""

import fcntl
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from seedrl.errors import InvalidMessage
from seedrl.wire import codec
from seedrl.wire.framing import parse, serialize
from seedrl.wire.layout import shared_bytes
from seedrl.wire.memory import OfferedBuffers, SharedBuffers, open_buffers, this_host
from seedrl.wire.messages import StepParts
from tests.fakes import make_spec
from tests.rig import make_rows

SPEC = make_spec(shape=(1, 4, 4), dtype="uint8")
ROOM = 3  # rows of a buffer


@pytest.fixture
def offered() -> Iterator[OfferedBuffers]:
    buffers = OfferedBuffers(buffers=2, buffer_bytes=shared_bytes(SPEC, ROOM))
    yield buffers
    buffers.close()


def memfds() -> list[str]:
    links = (os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path))
    return [link for link in links if "memfd:seedrl" in link]


def test_open_buffers_shows_what_the_other_end_writes(offered: OfferedBuffers) -> None:
    opened = open_buffers(offered.offer)
    for buffer in (1, 2):
        opened.bytes(buffer, 48)[:] = bytes([buffer]) * 48
    assert bytes(offered.bytes(1, 48)) == b"\1" * 48
    assert bytes(offered.bytes(2, 48)) == b"\2" * 48
    assert open_buffers(offered.offer).count == 2


def test_close_ends_finding_it_but_not_using_it(offered: OfferedBuffers) -> None:
    opened = open_buffers(offered.offer)
    offered.close()
    opened.bytes(1, 3)[:] = b"abc"
    assert bytes(offered.bytes(1, 3)) == b"abc"
    with pytest.raises(OSError, match="/proc/"):
        open_buffers(offered.offer)


def test_memory_is_gone_with_its_last_user() -> None:
    buffers = OfferedBuffers(2, 100)
    opened = open_buffers(buffers.offer)
    buffers.close()
    del buffers
    gc.collect()
    assert "memfd:seedrl" in Path("/proc/self/maps").read_text()
    opened.bytes(2, 100)[:] = bytes(100)  # is not touched by the end of the other
    del opened
    gc.collect()
    assert "memfd:seedrl" not in Path("/proc/self/maps").read_text()
    assert memfds() == []


def test_neither_end_can_shrink_it(offered: OfferedBuffers) -> None:
    with open(offered.offer.path, "r+b") as file, pytest.raises(PermissionError):
        file.truncate(10)


@pytest.mark.parametrize(
    "changes",
    [
        {"path": "/proc/self/fd/0"},
        {"path": "/etc/passwd"},
        {"path": "/proc/1/fd/../../../etc/passwd"},
        {"token": b"0" * 16},
        {"buffers": 3},
        {"buffer_bytes": 1 << 40},
    ],
)
def test_open_buffers_refuses_anything_else(offered: OfferedBuffers, changes: dict[str, object]) -> None:
    with pytest.raises(OSError, match=r"/proc/|/etc/"):
        open_buffers(offered.offer._replace(**changes))  # type: ignore[arg-type]


def test_open_buffers_refuses_a_file_that_could_shrink(tmp_path: Path, offered: OfferedBuffers) -> None:
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, os.stat(offered.offer.path).st_size)
    os.pwrite(fd, offered.offer.token, 0)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == 0
    with pytest.raises(OSError, match="not the memory that was offered"):
        open_buffers(offered.offer._replace(path=f"/proc/{os.getpid()}/fd/{fd}"))
    os.close(fd)


def test_open_buffers_works_from_another_process(offered: OfferedBuffers) -> None:
    program = f"""
from seedrl.wire.memory import open_buffers
from seedrl.wire.messages import Memory
open_buffers(Memory(*{tuple(offered.offer)!r})).bytes(2, 5)[:] = b"hello"
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert bytes(offered.bytes(2, 5)) == b"hello"


def test_this_host_is_the_same_in_every_process_of_a_user() -> None:
    program = "from seedrl.wire.memory import this_host; print(this_host())"
    other = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()
    assert other == this_host() != ""


def step_in(buffer: int, n: int = 2) -> StepParts:
    message = parse(serialize(codec.encode_step(1, make_rows(np.zeros((n, 1, 4, 4), np.uint8)), buffer)))
    assert isinstance(message, StepParts)
    return message


def test_decode_step_reads_rows_of_the_buffer_in_place(offered: OfferedBuffers) -> None:
    offered.bytes(2, 32)[:] = bytes(range(32))
    rows = codec.decode_step(step_in(2), SPEC, 4, offered)
    assert rows.observation.tobytes() == bytes(range(32))
    offered.bytes(2, 1)[0] = 99
    assert rows.observation.flat[0] == 99


def test_decode_step_copies_floats_before_it_checks_them() -> None:
    spec = make_spec(shape=(4,))
    memory = OfferedBuffers(1, 32)
    rows = codec.decode_step(step_in(1), spec, 4, memory)
    memory.bytes(1, 4)[:] = np.float32(np.nan).tobytes()
    assert np.isfinite(rows.observation).all()
    with pytest.raises(InvalidMessage, match=r"^observation: expected finite numbers, saw NaN or infinity in row 0"):
        codec.decode_step(step_in(1), spec, 4, memory)
    memory.close()


@pytest.mark.parametrize("dtype", ["int32", "int64", "float16", "float32", "float64"])
def test_decode_step_copies_numbers_that_it_compares_with_the_bound(dtype: str) -> None:
    """The peer can write to the memory at any time, so a number that was checked where it lies may be absurd later."""
    spec = make_spec(shape=(4,), dtype=dtype)
    memory = OfferedBuffers(1, 64)
    rows = codec.decode_step(step_in(1), spec, 4, memory, codec.Bounds(observation=100.0))
    memory.bytes(1, np.dtype(dtype).itemsize)[:] = np.array(1000, dtype).tobytes()
    assert not rows.observation.any()
    with pytest.raises(InvalidMessage, match=r"^observation: expected numbers between -100 and 100, saw one of"):
        codec.decode_step(step_in(1), spec, 4, memory, codec.Bounds(observation=100.0))
    memory.close()


@pytest.mark.parametrize(
    ("step", "complaint"),
    [
        (step_in(3), "buffer: expected 0 to 2, saw 3"),
        (step_in(2**32 - 1), "buffer: expected 0 to 2, saw 4294967295"),
        (step_in(1, n=4), "flags: expected rows of 48 bytes in a buffer, saw 4"),
        (step_in(1)._replace(observation=[b"12"]), "observation: expected nothing beside a buffer, saw 1 blobs"),
    ],
)
def test_decode_step_out_of_bounds_is_refused_by_name(offered: SharedBuffers, step: StepParts, complaint: str) -> None:
    with pytest.raises(InvalidMessage, match=f"^{complaint}"):
        codec.decode_step(step, SPEC, 8, offered)


def test_decode_step_buffer_without_memory_is_refused() -> None:
    with pytest.raises(InvalidMessage, match=r"^buffer: expected 0 to 0, saw 1"):
        codec.decode_step(step_in(1), SPEC, 8)
