"""Fixtures of all tests, and how many run at a time."""

import contextlib
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import Commands

pytest_plugins = ["tests.leftovers"]

# The list of runs that lie elsewhere is a file of the user's; the tests and all processes they start have one of their
# own, which ends with them.
_STATE = tempfile.TemporaryDirectory(prefix="seedrl-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name

SEEDS: dict[
    str, Callable[[Any], object]
] = {  # of libraries that are imported; torch.manual_seed would also ask for CUDA
    "numpy": lambda numpy: numpy.random.seed(0),
    "torch": lambda torch: torch.default_generator.manual_seed(0),
}


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Starts seedrl commands in a directory of the test."""
    with contextlib.closing(Commands(tmp_path)) as started:
        yield started


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Begin every test with the same seeds, whichever tests ran before in this process."""
    random.seed(0)
    for name, seed in SEEDS.items():
        if (module := sys.modules.get(name)) is not None:
            seed(module)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Give torch one thread, whichever files are run: tensors are tiny here, and more threads only wait."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def pytest_unconfigure() -> None:
    _STATE.cleanup()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Most tests wait for processes and deadlines most of the time, so one more than there are cores."""
    return min(4, len(os.sched_getaffinity(0)) + 1)
