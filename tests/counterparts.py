"""The other ends of our bridges: packages of others, in an environment of their own because they conflict with ours."""

import os
import sys
from pathlib import Path

import pytest

PYTHON = Path(sys.prefix) / "counterparts/bin/python"


def python_with_counterparts() -> str:
    """Return a Python that has openenv and openpi-client; without one the test is skipped, and fails in CI."""
    if PYTHON.exists():
        return str(PYTHON)
    words = f"there is no {PYTHON}: `make counterparts`"
    if os.environ.get("CI"):
        pytest.fail(words)
    pytest.skip(words)
