"""A venv for each peer, outside the repository, made on first use from what its adapter asks for at its top."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

SCRIPT_BLOCK = re.compile(r"^# /// script\n((?:#.*\n)+?)# ///$", re.MULTILINE)  # as PEP 723 has it
INSTALL = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


class PeerFailed(Exception):
    """A peer cannot be measured here; the message is the reason, in one sentence."""


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "seedrl" / "peers"


def requirements(adapter: Path) -> list[str]:
    """The pinned distributions an adapter needs."""
    block = SCRIPT_BLOCK.search(adapter.read_text())
    assert block, f"{adapter} has no block of requirements"
    lines = (line.removeprefix("#").strip() for line in block[1].splitlines())
    return list(tomllib.loads("\n".join(lines))["dependencies"])


def execute(command: Sequence[str]) -> None:
    """Runs a command to its end; the last thing it said is the reason if it fails."""
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise PeerFailed(f"it does not install: {last_words(done.stderr)}")


def prepare(adapter: Path, execute: Callable[[Sequence[str]], None] = execute) -> Path:
    """The Python of an adapter's venv, which is made anew if the adapter asks for something else than it holds."""
    wanted = requirements(adapter)
    home = cache_directory() / adapter.stem
    python, note = home / "bin" / "python", home / "installed.txt"
    if not (note.exists() and note.read_text().splitlines() == wanted):
        print(f"  installing {', '.join(wanted)} into {home}: some minutes, this once", flush=True)
        execute([sys.executable, "-m", "venv", "--clear", str(home)])
        execute([str(python), *INSTALL, *wanted])
        note.write_text("\n".join(wanted) + "\n")
    return python


def last_words(text: str) -> str:
    """The last line that says something, errors preferred to warnings."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() and not line.startswith("WARNING")]
    return (errors or lines or ["it said nothing"])[-1][:200]
