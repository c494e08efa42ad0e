"""Tests of how a rank's process ends."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit
from seedrl.ranks.ending import ending_at_once

atexit.register(print, "Python is torn down")
with ending_at_once():
    print("its last words")
    {end}
"""


@pytest.mark.parametrize(
    ("end", "code", "complaint"),
    [
        ("pass", 0, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('no such luck')", 1, "no such luck"),
        ("raise ArithmeticError('no such luck')", 1, "ArithmeticError: no such luck"),
    ],
)
def test_rank_ends_with_its_exit_code_and_words_and_without_tearing_down_python(
    end: str, code: int, complaint: str
) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "its last words\n")
    assert done.stderr.strip().endswith(complaint)
