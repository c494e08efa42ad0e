"""Finds run directories: the one that a word names, and the newest. Reads names and times, never the content of a run.

The newest run is the one that ran last, that is, whose context.json was written last. It is looked for below `runs/` of
the working directory, and among the runs that were started from the working directory with a `run_dir` elsewhere. Those
are listed in a file of the user's, because no search could find them: `seedrl/runs.json` in $XDG_STATE_HOME.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from seedrl.errors import ConfigError
from seedrl.run.directory import write_atomically

RUNS = Path("runs")  # where runs without a run_dir are
KEPT = 200  # runs in the list; older ones are forgotten

Listed = dict[str, str]  # run directory → the working directory it was started from, the newest last


def is_run(path: Path) -> bool:
    return (path / "config.yaml").is_file()


def is_trained(path: Path) -> bool:
    """Return whether a run has a checkpoint, or one that is complete but damaged."""
    return any((path / "checkpoints").glob("[0-9]*"))


def runs_below(directory: Path) -> Iterator[Path]:
    """Yield the directory itself if it is a run, otherwise every run below it, in the order of their names."""
    if is_run(directory):
        yield directory
        return
    with contextlib.suppress(OSError):  # it may be gone, or private
        for entry in sorted(directory.iterdir()):
            if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
                yield from runs_below(entry)


def find_run(word: str, must_be_trained: bool = False) -> Path:
    """Return the run that a word names: a run directory, or the newest run below a directory; "" means the newest."""
    if not word:
        return newest_run(must_be_trained)
    path = Path(word)
    if is_run(path):
        return path
    if not path.exists():
        raise ConfigError(f"there is no directory {word}")
    if not path.is_dir():
        raise ConfigError(f"{word} is a file, not a run directory")
    if (newest := _newest(runs_below(path), must_be_trained)) is None:
        raise ConfigError(f"{word} holds no {_wanted(must_be_trained)}")
    return newest


def newest_run(must_be_trained: bool = False) -> Path:
    """Return the newest run of the working directory; raise ConfigError if there is none."""
    newest = _newest([*runs_below(RUNS), *_started_here()], must_be_trained)
    if newest is None:
        raise ConfigError(
            f"there is no {_wanted(must_be_trained)} below {RUNS}/, nor was one started from here; "
            "name one: a run directory, as a plain word"
        )
    return newest


def remember(run: Path) -> None:
    """List a run that lies elsewhere than below `runs/` as one that was started from the working directory."""
    path = run.absolute()
    if path.is_relative_to(RUNS.absolute()):
        return
    listed = {each: origin for each, origin in _listed().items() if each != str(path) and Path(each).is_dir()}
    newest = dict([*listed.items(), (str(path), os.getcwd())][-KEPT:])
    with contextlib.suppress(OSError):  # a list that cannot be written is no reason not to train
        _list_file().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_list_file(), json.dumps(newest, indent=1) + "\n")


def _newest(runs: Iterator[Path] | list[Path], must_be_trained: bool) -> Path | None:
    found = [run for run in runs if not must_be_trained or is_trained(run)]
    return max(found, key=_ran_at, default=None)


def _ran_at(run: Path) -> float:
    """Return when a run was last known to run."""
    for name in ("context.json", "config.yaml"):
        with contextlib.suppress(OSError):
            return (run / name).stat().st_mtime
    return 0.0


def _wanted(must_be_trained: bool) -> str:
    return "run with a checkpoint" if must_be_trained else "run"


def _started_here() -> list[Path]:
    here = os.getcwd()
    runs = [Path(path) for path, origin in _listed().items() if origin == here]
    return [run.relative_to(here) if run.is_relative_to(here) else run for run in runs if is_run(run)]


def _listed() -> Listed:
    try:
        content = json.loads(_list_file().read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(path): str(origin) for path, origin in content.items()} if isinstance(content, dict) else {}


def _list_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    return Path(state) / "seedrl" / "runs.json"
