"""Programs that are not Python's and that some tests start."""

import os
import shutil

import pytest


def needed(name: str) -> str:
    """Where a program of Prometheus is; without it the test is skipped, and fails in CI."""
    if found := shutil.which(name):
        return found
    missing = f"there is no {name}: `make tools` as root, or apt-get install --no-install-recommends prometheus"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)
