"""Space that a run keeps on its disk, for the small files that must tell the truth when the disk is full.

The reserve is a file of random bytes in the run directory. `seedrl/run/directory.py` gives its space up for a moment to
replace a small file, which frees the space of the old one, and takes it back at once. Knows nothing of those files.
"""

import contextlib
import errno
import os
from pathlib import Path

FILE = ".reserve"
BYTES = 64 * 1024  # context.json, summary.json and config.yaml together, several times
FULL = (errno.ENOSPC, errno.EDQUOT)  # the errors of a disk, or of a user's share of it, that is full


def refill(directory: Path) -> None:
    """Make the reserve as large as it should be, or as large as the disk has room for."""
    with contextlib.suppress(OSError), (directory / FILE).open("ab", buffering=0) as file:
        missing = max(0, BYTES - file.tell())
        file.write(os.urandom(missing))  # zeros would take no space on a file system that compresses
        os.fsync(file.fileno())


def release(directory: Path) -> bool:
    """Give the space of the reserve up; return whether there was any."""
    path = directory / FILE
    try:
        size = path.stat().st_size
        os.truncate(path, 0)
    except OSError:
        return False
    return size > 0
