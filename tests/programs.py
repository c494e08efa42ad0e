"""Programs and libraries that are not Python's and that some tests need."""

import os
import shutil
from typing import NoReturn

import pytest


def needed(name: str) -> str:
    """Where a program of Prometheus is; without it the test is skipped, and fails in CI."""
    if found := shutil.which(name):
        return found
    missing(name, "prometheus")


def missing(name: str, package: str) -> NoReturn:
    """Skips the test, or fails in CI."""
    words = f"there is no {name}: `make tools` as root, or apt-get install --no-install-recommends {package}"
    if os.environ.get("CI"):
        pytest.fail(words)
    pytest.skip(words)
