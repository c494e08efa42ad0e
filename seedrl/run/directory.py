"""The run directory: everything that a run writes and resumes from. Knows nothing of torch.

config.yaml     the settings, complete
context.json    state, members, counters and addresses, see context.py
metrics.jsonl   one line of measurements every few seconds, more often in the first minute
checkpoints/    see checkpoint.py
logs/           what the actors of `seedrl run` print, and why a learner failed
summary.json    written at every clean end
tensorboard/, wandb/, wandb_run_id.txt   if the settings ask for them, see monitoring/sinks.py
curve.png       see monitoring/plots.py
card.md         the run on one page, see trained/card.py
.reserve        space for small files on a full disk, see reserve.py
policy.pt2, policy.onnx, videos/   written by `seedrl export` and `seedrl record`
"""

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import time
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import yaml

from seedrl.config import LearnerConfig
from seedrl.errors import ConfigError, RunDirectoryError
from seedrl.run import reserve

# A run may be resumed with other values of all settings except these.
PART_OF_THE_RUN = ("env", "model", "algorithm", "seed", "lockstep")


Schema = TypeVar("Schema")

OURS = ("logs", "checkpoints", "context.json")  # may be there before config.yaml is


class RunDirectory:
    """A run directory, which one learner at a time may claim. Owned by the main thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.metrics = path / "metrics.jsonl"
        self.earlier_processes = 0  # that have claimed this run before; known once it is claimed

    @classmethod
    def prepare(cls, config: LearnerConfig) -> "RunDirectory":
        """Create the directory, or use an existing one if its settings fit."""
        run = cls(Path(config.run_dir) if config.run_dir else fresh(Path("runs") / directory_name(config.env.id)))
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"{run.path} cannot be created: {error.strerror}; give another run_dir") from error
        before = run.settings()
        if before is not None:
            run._refuse_another_algorithm(before, config.algorithm.name)
            differing = _differences(before, plain(config))
            if differing:
                raise RunDirectoryError(
                    f"{run.path} holds a run with other settings: {'; '.join(differing)}. "
                    "Give the same settings, or another run_dir"
                )
        elif any(run.path.iterdir()) and not run._is_ours():
            raise RunDirectoryError(f"{run.path} is not empty and no run directory; give another run_dir")
        return run

    def _refuse_another_algorithm(self, before: dict[str, Any], name: str) -> None:
        """Name it alone: the other settings that differ follow from it."""
        trained_with = (before.get("algorithm") or {}).get("name", name)
        if trained_with != name:
            raise RunDirectoryError(another_algorithm(str(self.path), trained_with, name))

    def claim(self, config: LearnerConfig) -> None:
        """Keep other learners out until `release` or the end of the process, and write the settings."""
        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise RunDirectoryError(f"another learner is running in {self.path}; give another run_dir") from error
        self._write_settings(yaml.safe_dump(plain(config), sort_keys=False))
        self._count_processes()
        reserve.refill(self.path)

    def _write_settings(self, text: str) -> None:
        """Write config.yaml, unless it holds these settings: a run that resumes on a full disk needs no room for it."""
        path = self.path / "config.yaml"
        try:
            if not path.exists() or path.read_text() != text:
                write_atomically(path, text)
        except OSError as error:
            self.release()
            raise RunDirectoryError(f"{path} cannot be written: {error.strerror}; give another run_dir") from error

    def _count_processes(self) -> None:
        """Number the processes of a run, so that no two of them draw the same, even from the same checkpoint.

        If the disk is so full that the number cannot be written, the next process has the number of this one.
        """
        path = self.path / ".processes"
        with contextlib.suppress(FileNotFoundError, ValueError):
            self.earlier_processes = int(path.read_text())
        with contextlib.suppress(OSError):
            write_atomically(path, f"{self.earlier_processes + 1}\n")

    def release(self) -> None:
        self._lock.close()

    def settings(self) -> dict[str, Any] | None:
        """Return the content of config.yaml; None if there is none yet."""
        path = self.path / "config.yaml"
        if not path.exists():
            return None
        try:
            settings = yaml.safe_load(path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise RunDirectoryError(f"{path} cannot be read: {error}") from error
        if not isinstance(settings, dict):
            raise RunDirectoryError(f"{path} cannot be read: it holds no settings")
        return settings

    def config(self) -> LearnerConfig:
        """Return the settings as a learner has them, without those of another version that are not known here."""
        settings = self.settings()
        if settings is None:
            raise RunDirectoryError(f"{self.path} is no run directory: there is no config.yaml in it")
        return restored(LearnerConfig, settings)

    def append_metrics(self, row: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl, after one that a crash or a full disk may have cut off."""
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
        }
        with self.metrics.open("ab+") as file:
            start = "\n" if _is_torn(file) else ""
            file.write(f"{start}{json.dumps(finite)}\n".encode())

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=2) + "\n")

    def remove_if_unused(self) -> None:
        """Remove the directory of a run that could not start, unless its logs hold more than the message on screen."""
        is_explained = any("Traceback" in log.read_text(errors="replace") for log in self.logs.glob("*.log"))
        if not self.metrics.exists() and not any(self.checkpoints.glob("*")) and not is_explained:
            shutil.rmtree(self.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()  # runs/<env>, if this was the only one

    def _is_ours(self) -> bool:
        return all(path.name in OURS or path.name.startswith(".") for path in self.path.iterdir())


def check_initial_weights(init_from: str) -> None:
    """Refuse an init_from without a checkpoint, before anything is started."""
    path = Path(init_from)
    if not init_from or (path / "manifest.json").exists() or any(path.glob("checkpoints/*/manifest.json")):
        return
    what = "there is no such directory" if not path.exists() else "there is no checkpoint in it"
    raise ConfigError(f"init_from={init_from} must be a run directory or a checkpoint: {what}")


def another_algorithm(run: str, trained_with: str, name: str) -> str:
    """Return why a run is not resumed with another algorithm."""
    return (
        f"{run} is trained with {trained_with}, and algorithm.name={name} cannot resume it; give "
        f"algorithm.name={trained_with}, or another run_dir, which init_from={run} starts with the weights of this one"
    )


def _is_torn(file: BinaryIO) -> bool:
    """Return whether the file has content that does not end with a line."""
    if file.seek(0, os.SEEK_END) == 0:
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def plain(config: Any) -> dict[str, Any]:
    """Return a configuration as values that YAML and JSON can hold."""

    def simple(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return {field.name: simple(getattr(value, field.name)) for field in fields(value)}
        if isinstance(value, Enum):
            return value.name
        if isinstance(value, dict):
            return {key: simple(item) for key, item in value.items()}
        return [simple(item) for item in value] if isinstance(value, list) else value

    result: dict[str, Any] = simple(config)
    return result


def restored(schema: type[Schema], values: dict[str, Any]) -> Schema:
    """Return the configuration that `plain` made these values from."""
    defaults = schema()
    known = [name for name in vars(defaults) if name in values]
    return schema(**{name: _restored(getattr(defaults, name), values[name]) for name in known})


def _restored(default: Any, value: Any) -> Any:
    if is_dataclass(default) and isinstance(value, dict):
        return restored(type(default), value)
    return type(default)[value] if isinstance(default, Enum) else value


def write_atomically(path: Path, text: str) -> None:
    """Replace a file with this text, on a full disk with the space of the reserve that a run directory has.

    If that fails the file is what it was before.
    """
    try:
        _replace(path, text)
    except OSError as error:
        if error.errno not in reserve.FULL or not reserve.release(path.parent):
            raise
        try:
            _replace(path, text)
        finally:
            reserve.refill(path.parent)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def directory_name(env_id: str) -> str:
    """Return an environment's id as the name of one directory: gymnasium:CartPole-v1 becomes gymnasium-CartPole-v1."""
    return re.sub(r"[^\w.-]+", "-", env_id).strip(".-") or "env"


def fresh(parent: Path) -> Path:
    """Create a new directory named after the time."""
    name = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ["", *(f"-{number}" for number in range(2, 1000))]:
        path = parent / f"{name}{suffix}"
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
    raise RunDirectoryError(f"no free name below {parent}; give run_dir")


def _differences(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Return the settings that belong to the run and differ, as 'key was A, is B'."""
    names = PART_OF_THE_RUN if not prefix else sorted(before.keys() | now.keys())
    result = []
    for name in names:
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            result += _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            result.append(f"{prefix}{name} was {old}, is {new}")
    return result
