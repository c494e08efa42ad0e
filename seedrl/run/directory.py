"""The run directory: everything that a run writes and resumes from. Knows nothing of torch.

config.yaml     the settings of the learner, complete
job.yaml        the settings of `seedrl run` that are not the learner's; there is none if the learner was started alone
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
import json
import math
import os
import re
import shutil
import time
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import yaml

from seedrl.config import LearnerConfig, RunConfig
from seedrl.errors import ConfigError, RunDirectoryError
from seedrl.run import reserve

# A run that has begun may be resumed with other values of all settings except these.
PART_OF_THE_RUN = ("env", "model", "algorithm", "seed", "lockstep", "init_from")


CONFIG, JOB = "config.yaml", "job.yaml"
Schema = TypeVar("Schema")
Resumed = TypeVar("Resumed", bound=LearnerConfig)

OURS = ("logs", "checkpoints", "context.json", JOB)  # may be there before config.yaml is


class RunDirectory:
    """A run directory, which one learner at a time may claim. Owned by the main thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.metrics = path / "metrics.jsonl"
        self.earlier_processes = 0  # that have claimed this run before; known once it is claimed
        self.is_new = False  # whether `prepare` has created it

    @classmethod
    def prepare(cls, config: LearnerConfig) -> "RunDirectory":
        """Create the directory, or use an existing one if its settings fit."""
        run = cls(Path(config.run_dir) if config.run_dir else fresh(Path("runs") / directory_name(config.env.id)))
        run.is_new = not config.run_dir or not run.path.exists()
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"{run.path} cannot be created: {error.strerror}; give another run_dir") from error
        before = run.settings()
        if before is not None:
            run._refuse_other_settings(before, config)
        elif any(run.path.iterdir()) and not run._is_ours():
            raise RunDirectoryError(f"{run.path} is not empty and no run directory; give another run_dir")
        return run

    @property
    def has_begun(self) -> bool:
        """Return whether there is anything that other settings would not fit: measurements or checkpoints."""
        return self.metrics.exists() or self.checkpoints.exists()

    @property
    def has_job(self) -> bool:
        """Return whether `seedrl run` started this run, and not `seedrl learner`."""
        return (self.path / JOB).exists()

    def write_job(self, config: RunConfig) -> None:
        """Write the settings that a learner does not have, or has from its engine, so that the job can be resumed."""
        advertise = {"advertise": config.ranks.advertise}
        self._write_if_other(JOB, {"launch": plain(config.launch), "listen": config.listen, "ranks": advertise})

    def discard_if_unused(self) -> bool:
        """Remove the directory if it was created for a start in which nothing was trained; return whether it was.

        It stays if a log in it holds a traceback, which the message on screen may refer to.
        """
        is_explained = any("Traceback" in log.read_text(errors="replace") for log in self.logs.glob("*.log"))
        if not self.is_new or self.has_begun or is_explained:
            return False
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()  # that of the environment, if this was its first run
        return True

    def _refuse_other_settings(self, before: dict[str, Any], config: LearnerConfig) -> None:
        if not self.has_begun:
            return
        self._refuse_another_algorithm(before, config.algorithm.name)
        if differing := _differences(before, plain(config)):
            raise RunDirectoryError(
                f"{self.path} holds a run with other settings: {'; '.join(differing)}. These belong to the run: leave "
                f"them out, or give another run_dir, which init_from={self.path} starts with the weights of this one"
            )

    def _refuse_another_algorithm(self, before: dict[str, Any], name: str) -> None:
        """Name it alone: the other settings that differ follow from it."""
        trained_with = (before.get("algorithm") or {}).get("name", name)
        if trained_with != name:
            raise RunDirectoryError(another_algorithm(str(self.path), trained_with, name))

    def claim(self, config: LearnerConfig) -> None:
        """Keep other learners out until `release` or the end of the process, and write the settings."""
        import fcntl  # only Unix has it, and actors elsewhere import this module for its other half

        self._lock = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise RunDirectoryError(f"another learner is running in {self.path}; give another run_dir") from error
        lasting = replace(config, socket="")  # the socket is one of this process
        try:
            self._write_if_other(CONFIG, plain(lasting))
        except RunDirectoryError:
            self.release()
            raise
        self._count_processes()
        reserve.refill(self.path)

    def _write_if_other(self, name: str, settings: dict[str, Any]) -> None:
        """Write settings to a file, unless it holds them: a run that resumes on a full disk needs no room for it."""
        path, text = self.path / name, yaml.safe_dump(settings, sort_keys=False)
        try:
            if not path.exists() or path.read_text() != text:
                write_atomically(path, text)
        except OSError as error:
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
        return self._read(CONFIG)

    def _read(self, name: str) -> dict[str, Any] | None:
        """Return the settings in a file; None if there is no such file."""
        path = self.path / name
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
        return restored(LearnerConfig, self._own_settings())

    def settings_to_resume(self, schema: type[Resumed]) -> Resumed:
        """Return the settings that this run is resumed with, as those of `seedrl run` or of `seedrl learner`."""
        settings = self._own_settings()
        if not settings.get("listen"):  # then each command has a default of its own
            settings.pop("listen", None)
        if issubclass(schema, RunConfig) and (job := self._read(JOB)) is not None:
            settings |= {**job, "ranks": {**settings.get("ranks", {}), **job.get("ranks", {})}}
        return restored(schema, settings)

    def _own_settings(self) -> dict[str, Any]:
        settings = self.settings()
        if settings is None:
            raise RunDirectoryError(f"{self.path} is no run directory: there is no {CONFIG} in it")
        return settings

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

    def _is_ours(self) -> bool:
        return all(path.name in OURS or path.name.startswith(".") for path in self.path.iterdir())


def check_initial_weights(config: LearnerConfig) -> None:
    """Refuse an init_from without a checkpoint, before anything is started; a run that has begun needs none."""
    path = Path(config.init_from)
    has_begun = bool(config.run_dir) and RunDirectory(Path(config.run_dir)).has_begun
    is_there = (path / "manifest.json").exists() or any(path.glob("checkpoints/*/manifest.json"))
    if not config.init_from or is_there or has_begun:
        return
    what = "there is no such directory" if not path.exists() else "there is no checkpoint in it"
    raise ConfigError(f"init_from={config.init_from} must be a run directory or a checkpoint: {what}")


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


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file with this content, on a full disk with the space of the reserve that a run directory has.

    If that fails the file is what it was before.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        _replace(path, data)
    except OSError as error:
        if error.errno not in reserve.FULL or not reserve.release(path.parent):
            raise
        try:
            _replace(path, data)
        finally:
            reserve.refill(path.parent)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
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
