"""Fixtures of all tests, and how many run at a time."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.processes import Commands


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Starts seedrl commands in a directory of the test."""
    started = Commands(tmp_path)
    yield started
    started.close()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Most tests wait for processes and deadlines most of the time, so one more than there are cores."""
    return min(4, len(os.sched_getaffinity(0)) + 1)
