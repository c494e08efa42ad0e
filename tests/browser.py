"""A headless browser shows what a page looks like after its scripts have run."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60.0  # for one page; reached only when something hangs
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def chromium() -> str:
    """Return the path of the browser; without one the test is skipped, and fails in CI."""
    if found := find_chromium():
        return found
    missing = "there is no Chromium to look at the page with: apt-get install chromium"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


def dom_of(url: str, milliseconds: int) -> str:
    """Return the document after some virtual time, which passes faster than real time unless the page waits."""
    return _run("--dump-dom", f"--virtual-time-budget={milliseconds}", url)


def screenshot(url: str, path: Path, width: int, height: int, milliseconds: int = 3000, is_dark: bool = False) -> None:
    dark = ["--blink-settings=preferredColorScheme=0"] if is_dark else ["--blink-settings=preferredColorScheme=1"]
    _run(*dark, f"--screenshot={path}", f"--window-size={width},{height}", f"--virtual-time-budget={milliseconds}", url)
    assert path.stat().st_size


def _run(*arguments: str) -> str:
    """Return what the browser printed; end its process group, whatever happens."""
    program = chromium()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with process:
            try:
                out, _ = process.communicate(timeout=SECONDS)
            finally:
                _end(process.pid)
    assert process.returncode == 0, f"{program} {' '.join(arguments)} ended with {process.returncode}"
    return out.decode()


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
