"""Free memory as the kernel tells it, from files that are laid out as those of machines and containers are."""

from collections.abc import Callable
from pathlib import Path

import pytest

from seedrl.run.host_memory import free_host_bytes

GIB = 2**30
V1_UNLIMITED = 9223372036854771712


def lay_out(root: Path, files: dict[str, object]) -> Path:
    """Write a fake file system; the machine has 8 GiB free."""
    for name, content in {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def group_v2(path: str, limit: object, used: int, cached: int = 0) -> dict[str, object]:
    folder = f"sys/fs/cgroup{path}"
    statistics = f"anon {used}\ninactive_file {cached}"
    return {f"{folder}/memory.max": limit, f"{folder}/memory.current": used, f"{folder}/memory.stat": statistics}


def group_v1(path: str, limit: int, used: int, cached: int = 0) -> dict[str, object]:
    folder = f"sys/fs/cgroup/memory{path}"
    statistics = f"inactive_file 1\ntotal_inactive_file {cached}"
    return {
        f"{folder}/memory.limit_in_bytes": limit,
        f"{folder}/memory.usage_in_bytes": used,
        f"{folder}/memory.stat": statistics,
    }


def test_host_memory_without_control_groups_is_that_of_the_machine(tmp_path: Path) -> None:
    assert free_host_bytes(lay_out(tmp_path, {})) == 8 * GIB


def test_host_memory_is_what_the_limit_of_its_group_leaves(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/pod/learner", **group_v2("/pod/learner", 2 * GIB, GIB)}
    assert free_host_bytes(lay_out(tmp_path, files)) == GIB


def test_host_memory_is_the_least_that_any_group_above_leaves(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/learner",
        **group_v2("/pod/learner", "max", GIB),
        **group_v2("/pod", 4 * GIB, 3 * GIB + 5),
        **group_v2("", 64 * GIB, 0),
    }
    assert free_host_bytes(lay_out(tmp_path, files)) == GIB - 5


def test_host_memory_in_a_container_is_limited_by_the_top_that_it_sees(tmp_path: Path) -> None:
    """Docker mounts the group of the container as the top, while /proc still has the path on the host."""
    files = {"proc/self/cgroup": "5:cpu:/docker/1\n4:memory:/docker/1", **group_v1("", 3 * GIB, GIB)}
    assert free_host_bytes(lay_out(tmp_path, files)) == 2 * GIB


def test_host_memory_of_version_1_is_read_beside_an_empty_version_2(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:cpu,memory:/a/b\n0::/",
        **group_v1("/a/b", V1_UNLIMITED, GIB),
        **group_v1("/a", 3 * GIB, GIB),
    }
    assert free_host_bytes(lay_out(tmp_path, files)) == 2 * GIB


@pytest.mark.parametrize("group", [group_v1, group_v2])
def test_host_memory_that_only_caches_files_is_free(tmp_path: Path, group: Callable[..., dict[str, object]]) -> None:
    controllers = "memory" if group is group_v1 else ""
    files = {"proc/self/cgroup": f"0:{controllers}:/a", **group("/a", 4 * GIB, 3 * GIB, cached=2 * GIB)}
    assert free_host_bytes(lay_out(tmp_path, files)) == 3 * GIB


def test_host_memory_beyond_its_limit_is_nothing(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a", **group_v2("/a", GIB, 2 * GIB)}
    assert free_host_bytes(lay_out(tmp_path, files)) == 0


def test_host_memory_where_the_system_does_not_tell_is_unknown(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) is None
