"""Memory that both ends of a stream have mapped when they run on one machine. Knows nothing of messages.

The learner makes it, as an anonymous file that has no name to clean up: the kernel frees it when the last of the two is
gone, however that one died. It is sealed, so neither end can shrink it under the other. The actor opens it through the
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
    """Some buffers of one size, numbered from 1, behind a page that begins with the token. Both ends may write."""

    def __init__(self, fd: int, offer: Memory) -> None:
        self.count = offer.buffers
        self.buffer_bytes = offer.buffer_bytes
        self._memory = memoryview(mmap.mmap(fd, _size(offer)))

    def bytes(self, buffer: int, size: int) -> memoryview:
        """The first bytes of a buffer; the caller has checked that it has so many."""
        at = PAGE + (buffer - 1) * _stride(self.buffer_bytes)
        return self._memory[at : at + size]


class OfferedBuffers(SharedBuffers):
    """The learner's end. It can be found at the path it offers until `close`; the memory outlives that."""

    def __init__(self, buffers: int, buffer_bytes: int) -> None:
        self._fd: int | None = os.memfd_create("seedrl", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.offer = Memory(path, secrets.token_bytes(TOKEN_BYTES), buffers, buffer_bytes)
        os.ftruncate(self._fd, _size(self.offer))
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        super().__init__(self._fd, self.offer)
        self._memory[:TOKEN_BYTES] = self.offer.token

    def close(self) -> None:
        """Whoever has opened it keeps it."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def open_buffers(offer: Memory) -> SharedBuffers:
    """The actor's end. Raises OSError when this is not, or not safely, the memory that was offered."""
    if not IS_AVAILABLE or not _PATH.fullmatch(offer.path):
        raise OSError(f"{offer.path} is no shared memory that can be opened here")
    fd = os.open(offer.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_size != _size(offer) or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise OSError(f"{offer.path} is not the memory that was offered")
        if os.pread(fd, TOKEN_BYTES, 0) != offer.token:
            raise OSError(f"{offer.path} is the memory of somebody else")
        return SharedBuffers(fd, offer)
    finally:
        os.close(fd)


def this_host() -> str:
    """Equal for processes that may share memory: those of one user on one running machine. Empty where none can."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
    return f"{boot}/{os.getuid()}" if IS_AVAILABLE else ""


def _stride(buffer_bytes: int) -> int:
    return -(-buffer_bytes // PAGE) * PAGE


def _size(offer: Memory) -> int:
    return PAGE + offer.buffers * _stride(offer.buffer_bytes)
