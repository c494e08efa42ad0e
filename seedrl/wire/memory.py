"""Memory that both ends of a stream map when they run on one machine. Knows nothing of what is written there.

The learner makes it as an anonymous file, which has no name to clean up: the kernel frees it when both processes are
gone, however they died. It is sealed, so neither end can shrink it under the other. The actor opens it through the
learner's /proc entry, which the kernel permits to the same user only.
"""

import mmap
import os
import re
import secrets
from pathlib import Path

from seedrl.wire.messages import Memory

try:
    import fcntl

    SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    IS_AVAILABLE = hasattr(os, "memfd_create")
except (ImportError, AttributeError):  # not Linux
    IS_AVAILABLE = False

WORTH_BYTES = 16 * 1024  # of a request: smaller ones cost no more inside the message
TOKEN_BYTES = 16
PAGE = mmap.PAGESIZE
_PATH = re.compile(r"/proc/\d+/fd/\d+")


class SharedBuffers:
    """Buffers of one size, numbered from 1, behind a page that begins with the token. Both ends may write."""

    def __init__(self, fd: int, offer: Memory) -> None:
        self.count = offer.buffers
        self.buffer_bytes = offer.buffer_bytes
        self._memory = memoryview(mmap.mmap(fd, _size(offer)))

    def bytes(self, buffer: int, size: int) -> memoryview:
        """Return the first bytes of a buffer; the caller has checked that it is large enough."""
        at = PAGE + (buffer - 1) * _stride(self.buffer_bytes)
        return self._memory[at : at + size]


class OfferedBuffers(SharedBuffers):
    """The learner's end. Actors can open it at the path it offers until `close`; the memory lives longer."""

    def __init__(self, buffers: int, buffer_bytes: int) -> None:
        self._fd: int | None = os.memfd_create("seedrl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.offer = Memory(path, secrets.token_bytes(TOKEN_BYTES), buffers, buffer_bytes)
        os.ftruncate(self._fd, _size(self.offer))
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        super().__init__(self._fd, self.offer)
        self._memory[:TOKEN_BYTES] = self.offer.token

    def close(self) -> None:
        """Let no further process open it; those that have opened it keep it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def open_buffers(offer: Memory) -> SharedBuffers:
    """Return the actor's end. Raises OSError if this is not the memory that was offered, or is not safe to use."""
    if not IS_AVAILABLE or not _PATH.fullmatch(offer.path):
        raise OSError(f"{offer.path} is not shared memory that can be opened here")
    fd = os.open(offer.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != _size(offer) or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise OSError(f"{offer.path} is not the memory that was offered")
        if os.pread(fd, TOKEN_BYTES, 0) != offer.token:
            raise OSError(f"{offer.path} is the memory of another session")
        return SharedBuffers(fd, offer)
    finally:
        os.close(fd)


def this_host() -> str:
    """Return a text that is equal for processes of one user on one machine; empty where memory cannot be shared."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return f"{boot}/{os.getuid()}" if IS_AVAILABLE else ""


def _stride(buffer_bytes: int) -> int:
    return -(-buffer_bytes // PAGE) * PAGE


def _size(offer: Memory) -> int:
    return PAGE + offer.buffers * _stride(offer.buffer_bytes)
