"""The destinations of a run's measurements: metrics.jsonl, and on request TensorBoard and W&B.

Knows nothing of what the measurements mean. Nothing here stops a run: a sink that fails is reported once and tried
again with the next row, and training continues.
"""

import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from seedrl.config import LearnerConfig
from seedrl.errors import ConfigError
from seedrl.monitoring.sampler import Row
from seedrl.monitoring.videos import Videos
from seedrl.run.directory import RunDirectory, plain, write_atomically

# The groups that TensorBoard and W&B show together. Names with a slash have their group already.
TAGS = {
    "return_mean_100": "return/mean_100",
    "episodes": "return/episodes",
    "return_p10": "return/p10",
    "return_p50": "return/p50",
    "return_p90": "return/p90",
    "returns": "return/returns",
    "return_sum": "return/sum",
    "reward_per_step": "return/reward_per_step",
    "eval_return_mean_100": "return/eval_mean_100",
    "eval_episodes": "return/eval_episodes",
    "seconds": "progress/seconds",
    "frames": "progress/frames",
    "updates": "progress/updates",
    "policy_lag": "progress/policy_lag",
    "reuse": "progress/reuse",
    "grad_norm": "optimizer/grad_norm",
    "learning_rate": "optimizer/learning_rate",
    "steps_per_second": "speed/steps_per_second",
    "inference_batch": "speed/inference_batch",
    "learner_wait_fraction": "speed/learner_wait_fraction",
    "actor_wait_fraction": "speed/actor_wait_fraction",
    "backpressure_fraction": "speed/backpressure_fraction",
}
AXES = ("time", "env_steps")  # the others are plotted over these

# Variables that W&B reads, set here unless they are set already: no prompts, no output, no long waits for a server.
WANDB_DEFAULTS = {
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
    "WANDB_INIT_TIMEOUT": "30",
    "WANDB_FINISH_TIMEOUT": "30",
}
WANDB_ID = "wandb_run_id.txt"


class Sink(Protocol):
    """A destination of measurements. Its methods may raise anything."""

    name: str  # as in "… could not be written"

    def write(self, row: Row) -> None: ...

    def close(self, summary: Row) -> None: ...


class Sinks:
    """Every sink of a run. Owned by the main thread."""

    def __init__(self, run_directory: RunDirectory, config: LearnerConfig, say: Callable[[str], None]) -> None:
        """Raise ConfigError if the settings ask for a package that is not installed."""
        self._say = say
        self._reported: set[str] = set()
        self._sinks: list[Sink] = [MetricsFile(run_directory)]
        if config.report.tensorboard:
            self._sinks.append(TensorBoard(run_directory.path / "tensorboard"))
        if config.report.video_seconds:
            self._sinks.append(Videos(run_directory.path, config.report.video_seconds))
        if config.report.wandb:
            run = WeightsAndBiases()
            with self._tolerant(run.name):
                say(f"learner: W&B run in {run.begin(run_directory.path, config)}")
                self._sinks.append(run)

    def write(self, row: Row) -> None:
        row = {"time": time.time(), **row}
        for sink in self._sinks:
            with self._tolerant(sink.name):
                sink.write(row)

    def close(self, summary: Row) -> None:
        for sink in self._sinks:
            with self._tolerant(sink.name):
                sink.close(summary)

    @contextmanager
    def _tolerant(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if name not in self._reported:
                self._reported.add(name)
                reason = (str(error) or repr(error)).splitlines()[0]
                self._say(f"learner: {name} could not be written ({reason}); training continues")


class MetricsFile:
    """metrics.jsonl of the run directory."""

    name = "metrics"

    def __init__(self, run_directory: RunDirectory) -> None:
        self._run_directory = run_directory

    def write(self, row: Row) -> None:
        self._run_directory.append_metrics(row)

    def close(self, summary: Row) -> None:
        """Do nothing: no file is open between rows, and the learner writes summary.json."""


class TensorBoard:
    """Event files as TensorBoard reads them, written without TensorFlow or torch, flushed row by row."""

    name = "TensorBoard events"

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise ConfigError(
                f"report.tensorboard=true needs TensorBoard: pip install 'seedrl[tensorboard]' ({error})"
            ) from error
        self._event, self._session_log, self._summary, self._records = Event, SessionLog, Summary, RecordWriter
        self._directory = directory
        self._file: BinaryIO | None = None

    def write(self, row: Row) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in tagged(row).items()]
        try:
            if self._file is None:
                self._file = self._open(row)
            self._append(self._file, row, summary=self._summary(value=values))
        except OSError:
            self._abandon()  # the last record may be torn, which would hide all after it
            raise

    def close(self, summary: Row) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self, row: Row) -> BinaryIO:
        """Open a new file. What earlier files hold from its first step on was undone by a crash and is not shown."""
        self._directory.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        file = (self._directory / name).open("xb")
        self._append(file, {**row, "env_steps": 0}, file_version="brain.Event:2")
        self._append(file, row, session_log=self._session_log(status=self._session_log.START))
        return file

    def _append(self, file: BinaryIO, row: Row, **content: Any) -> None:
        event = self._event(wall_time=row["time"], step=row["env_steps"], **content)
        self._records(file).write(event.SerializeToString())
        file.flush()

    def _abandon(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


class WeightsAndBiases:
    """A run of W&B, which stays the same after a resume. W&B uploads from a process of its own."""

    name = "the W&B run"

    def __init__(self) -> None:
        for variable, value in WANDB_DEFAULTS.items():
            os.environ.setdefault(variable, value)  # before the import, which reads them
        try:
            from wandb import init
        except ImportError as error:
            raise ConfigError(f"report.wandb needs W&B: pip install 'seedrl[wandb]' ({error})") from error
        self._init: Any = init

    def begin(self, directory: Path, config: LearnerConfig) -> str:
        """Start or resume the run; return its address or directory."""
        self._run: Any = self._init(
            project=config.report.wandb,
            name=f"{config.env.id} {directory.name}",
            id=_wandb_id(directory / WANDB_ID),
            resume="allow",
            dir=str(directory),
            config=plain(config),
        )
        return self._run.url or str(directory / "wandb")  # the latter if offline; `wandb sync` uploads it

    def write(self, row: Row) -> None:
        self._run.log(tagged(row), step=row["env_steps"])

    def close(self, summary: Row) -> None:
        self._run.summary.update(summary)
        self._run.finish(exit_code=1 if summary.get("status") == "failed" else 0)


def tagged(row: Row) -> dict[str, float]:
    """Return what can be plotted, under grouped names: finite numbers, without the axes."""
    return {
        TAGS.get(name, name if "/" in name else f"health/{name}"): value
        for name, value in row.items()
        if name not in AXES and isinstance(value, int | float) and math.isfinite(value)
    }


def _wandb_id(path: Path) -> str:
    """Return the id of the run at W&B, which is created on first use."""
    if not path.exists():
        write_atomically(path, f"{secrets.token_hex(4)}\n")
    return path.read_text().strip()
