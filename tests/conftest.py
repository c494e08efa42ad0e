"""Fixtures of all tests."""

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
