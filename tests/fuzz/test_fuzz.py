"""The decoder under atheris; hypothesis does the same for a second with every change, in tests/test_codec.py."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_decoder_under_a_million_inputs_raises_only_refused() -> None:
    """B5: no crash, no uncaught exception."""
    pytest.importorskip("atheris", reason="`make chaos` installs it")
    command = [sys.executable, "-m", "tests.fuzz.decoder", "-atheris_runs=1000000", "-seed=1", "-max_len=512"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(done.stderr[-2000:])
    assert done.returncode == 0
    assert "Done 1000000" in done.stderr or "#1000000" in done.stderr
