"""The memory that this process can still take from its host. Knows nothing of devices or of what the memory is for.

The kernel states what is free on the machine, but a container may have less: each control group from that of this
process up to the root can have a limit, and all processes in it share that. The smallest remainder counts. Files that
the kernel has cached for a group count as used there, although the kernel gives up those that are no longer in use; so
they are added again.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MEMINFO, CGROUP = "proc/meminfo", "proc/self/cgroup"


class Hierarchy(NamedTuple):
    """The names of a version of control groups: where they are mounted, and the files of a group."""

    mounts: tuple[str, ...]
    limit: str
    usage: str
    cached: str  # a line of memory.stat


V1 = Hierarchy(("sys/fs/cgroup/memory",), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = Hierarchy(("sys/fs/cgroup", "sys/fs/cgroup/unified"), "memory.max", "memory.current", "inactive_file")


def free_host_bytes(root: Path = Path("/")) -> int | None:
    """Return what can still be allocated; None where the system does not tell. `root` is the root of all files."""
    return min((*_free_of_machine(root), *_free_of_groups(root)), default=None)


def _free_of_machine(root: Path) -> Iterator[int]:
    for line in _lines(root / MEMINFO):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _free_of_groups(root: Path) -> Iterator[int]:
    """Yield what is left of every limit, in whichever version of control groups it is set."""
    for line in _lines(root / CGROUP):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        hierarchy = V1 if controllers else V2
        for mount in hierarchy.mounts:
            yield from _free_upwards(root / mount, path, hierarchy)


def _free_upwards(mount: Path, path: str, hierarchy: Hierarchy) -> Iterator[int]:
    """Yield what is left in the group and in those above it. A container may see only the top of its own path."""
    group = mount / path.strip("/")
    for level in (group, *group.parents):
        if level.is_relative_to(mount):
            yield from _free_of_group(level, hierarchy)


def _free_of_group(group: Path, hierarchy: Hierarchy) -> Iterator[int]:
    limit, usage = _number(group / hierarchy.limit), _number(group / hierarchy.usage)
    if limit is not None and usage is not None:
        statistics = dict(line.split(" ", 1) for line in _lines(group / "memory.stat"))
        yield max(0, limit - usage + int(statistics.get(hierarchy.cached, 0)))


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is no such file, or it holds the word for no limit."""
    content = "".join(_lines(path))
    return int(content) if content.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
