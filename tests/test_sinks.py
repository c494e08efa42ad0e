"""Where measurements go: written, read back by those they are for, and never in the way of training."""

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from seedrl.config import LearnerConfig, ReportConfig
from seedrl.errors import ConfigError
from seedrl.monitoring.sinks import WANDB_DEFAULTS, WANDB_ID, Sinks, tagged
from seedrl.run.directory import RunDirectory

SUMMARY = {"status": "done", "return_mean_100": 475.0, "dropped_rows": {}}


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sink sets for W&B is gone after the test."""
    for variable, value in WANDB_DEFAULTS.items():
        monkeypatch.setenv(variable, value)


def row(env_steps: int, score: float | None, **more: Any) -> dict[str, Any]:
    return {
        "env_steps": env_steps,
        "return_mean_100": score,
        "steps_per_second": 1000.0,
        "algorithm/value_loss": 0.5,
        **more,
    }


class Reporting:
    """Sinks of a run directory, and what they said."""

    def __init__(self, directory: Path, **report: Any) -> None:
        self.said: list[str] = []
        config = LearnerConfig(report=ReportConfig(**report))
        self.sinks = Sinks(RunDirectory(directory), config, self.said.append)

    def report(self, *rows: dict[str, Any]) -> None:
        for each in rows:
            self.sinks.write(each)
        self.sinks.close(SUMMARY)


def metrics_in(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def scalars_in(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag → (step, value)s, as TensorBoard sees them."""
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in sorted(events.Tags()["scalars"])
    }


# metrics.jsonl


def test_sinks_by_default_write_metrics_with_their_time_and_nothing_else(tmp_path: Path) -> None:
    Reporting(tmp_path).report(row(10, None), row(20, 5.0))
    first, second = metrics_in(tmp_path)
    assert 0 < first.pop("time") <= second.pop("time")
    assert [first, second] == [row(10, None), row(20, 5.0)]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_sinks_metrics_that_cannot_be_written_are_said_once_and_tried_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    reporting = Reporting(tmp_path)
    reporting.sinks.write(row(10, 1.0))
    reporting.sinks.write(row(20, 1.0))
    (tmp_path / "metrics.jsonl").rmdir()
    reporting.report(row(30, 1.0))
    (said,) = reporting.said
    assert said.startswith("learner: metrics could not be written ([Errno 21]")
    assert said.endswith("; training continues")
    assert [each["env_steps"] for each in metrics_in(tmp_path)] == [30]


# Names.


def test_tagged_keeps_finite_numbers_under_grouped_names() -> None:
    measured = row(10, None, time=1.0, seconds=2, actors=3, note="x", lost=float("nan"), dropped={"a": 1})
    assert tagged(measured) == {
        "speed/steps_per_second": 1000.0,
        "algorithm/value_loss": 0.5,
        "progress/seconds": 2,
        "health/actors": 3,
    }


# TensorBoard.


def test_tensorboard_shows_every_number_over_steps(tmp_path: Path) -> None:
    reporting = Reporting(tmp_path, tensorboard=True)
    reporting.report(row(10, None), row(20, 5.0), row(30, 7.0))
    assert scalars_in(tmp_path) == {
        "algorithm/value_loss": [(10, 0.5), (20, 0.5), (30, 0.5)],
        "return/mean_100": [(20, 5.0), (30, 7.0)],
        "speed/steps_per_second": [(10, 1000.0), (20, 1000.0), (30, 1000.0)],
    }
    assert reporting.said == []
    assert len(metrics_in(tmp_path)) == 3


def test_tensorboard_row_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    reporting = Reporting(tmp_path, tensorboard=True)
    reporting.sinks.write(row(20, 5.0))
    assert scalars_in(tmp_path)["return/mean_100"] == [(20, 5.0)]
    reporting.sinks.close(SUMMARY)


def test_tensorboard_of_a_crashed_and_resumed_run_does_not_overlap(tmp_path: Path) -> None:
    Reporting(tmp_path, tensorboard=True).report(row(10, 1.0), row(20, 2.0), row(30, 99.0), row(40, 99.0))
    Reporting(tmp_path, tensorboard=True).report(row(25, 3.0), row(35, 4.0))
    assert scalars_in(tmp_path)["return/mean_100"] == [(10, 1.0), (20, 2.0), (25, 3.0), (35, 4.0)]


def test_tensorboard_that_cannot_be_written_is_said_once_and_goes_on_later(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").touch()
    reporting = Reporting(tmp_path, tensorboard=True)
    reporting.sinks.write(row(10, 1.0))
    reporting.sinks.write(row(20, 2.0))
    (tmp_path / "tensorboard").unlink()
    reporting.report(row(30, 3.0))
    (said,) = reporting.said
    assert said.startswith("learner: TensorBoard events could not be written (")
    assert scalars_in(tmp_path)["return/mean_100"] == [(30, 3.0)]
    assert len(metrics_in(tmp_path)) == 3


def test_tensorboard_after_a_torn_record_goes_on_in_a_new_file(tmp_path: Path) -> None:
    class FullDisk:
        """A disk that takes half a record."""

        def __init__(self, file: Any) -> None:
            self._file = file

        def write(self, data: bytes) -> None:
            self._file.write(data[: len(data) // 2])
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            self._file.close()

    reporting = Reporting(tmp_path, tensorboard=True)
    reporting.sinks.write(row(10, 1.0))
    sink: Any = reporting.sinks._sinks[1]
    sink._file = FullDisk(sink._file)
    reporting.report(row(20, 2.0), row(30, 3.0))
    assert reporting.said == [
        "learner: TensorBoard events could not be written ([Errno 28] No space left on device); training continues"
    ]
    assert scalars_in(tmp_path)["return/mean_100"] == [(10, 1.0), (30, 3.0)]


def test_tensorboard_that_is_not_installed_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(ConfigError, match=r"report.tensorboard=true needs .* pip install 'seedrl\[tensorboard\]'"):
        Reporting(tmp_path, tensorboard=True)


# W&B.


@pytest.fixture
def wandb_offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As for somebody who has never logged in, with nothing left behind in the process."""
    home = str(tmp_path_factory.mktemp("home"))
    for variable in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(variable, home)
    monkeypatch.setenv("NETRC", f"{home}/netrc")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")  # it would start threads that send reports until Python ends
    yield
    import wandb

    wandb.teardown()


def records_in(directory: Path) -> list[Any]:
    """What the offline runs hold, oldest first: a LevelDB log of protocol buffers after seven bytes of header."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # as at the end of the process; `finish` alone may return before everything is on disk
    records = []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        data, at, whole = path.read_bytes(), 7, b""
        while at + 7 <= len(data):
            _, length, kind = struct.unpack("<IHB", data[at : at + 7])
            whole += data[at + 7 : at + 7 + length]
            at += 7 + length
            if 32768 - at % 32768 < 7:  # no header fits into what is left of the block
                at += 32768 - at % 32768
            if kind in (1, 4):  # a whole record, or its last part
                records.append(Record.FromString(whole))
                whole = b""
    return records


def items_of(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.mark.usefixtures("wandb_offline")
def test_wandb_offline_run_holds_settings_rows_and_summary(tmp_path: Path) -> None:
    reporting = Reporting(tmp_path, wandb="a-project")
    reporting.report(row(10, None), row(20, 5.0))
    records = records_in(tmp_path)
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.project, run.run_id) == ("a-project", (tmp_path / WANDB_ID).read_text().strip())
    assert items_of(run.config.update)["env"]["id"] == "CartPole-v1"
    rows = [items_of(record.history.item) for record in records if record.HasField("history")]
    assert [(each["_step"], each.get("return/mean_100")) for each in rows] == [(10, None), (20, 5.0)]
    summaries = [items_of(record.summary.update) for record in records if record.HasField("summary")]
    assert {"status": "done", "return_mean_100": 475.0}.items() <= {
        key: value for each in summaries for key, value in each.items()
    }.items()
    assert reporting.said == [f"learner: W&B run in {tmp_path / 'wandb'}"]


@pytest.mark.usefixtures("wandb_offline")
def test_wandb_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    Reporting(tmp_path, wandb="a-project").report(row(10, 1.0))
    before = (tmp_path / WANDB_ID).read_text()
    Reporting(tmp_path, wandb="a-project").report(row(20, 2.0))
    assert (tmp_path / WANDB_ID).read_text() == before
    ids = {record.run.run_id for record in records_in(tmp_path) if record.HasField("run")}
    assert ids == {before.strip()}


@pytest.mark.usefixtures("wandb_offline")
def test_wandb_without_a_login_is_said_once_and_the_rest_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    reporting = Reporting(tmp_path, wandb="a-project", tensorboard=True)
    reporting.report(row(10, 1.0), row(20, 2.0))
    (said,) = reporting.said
    assert said.startswith("learner: the W&B run could not be written (No API key configured")
    assert len(metrics_in(tmp_path)) == 2
    assert len(scalars_in(tmp_path)["return/mean_100"]) == 2


def test_wandb_that_fails_later_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for a failure without a message and at the end, too."""

    class Broken:
        url = "https://wandb.example/run"

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: Broken()))
    reporting = Reporting(tmp_path, wandb="a-project")
    reporting.report(row(10, 1.0), row(20, 2.0))
    assert reporting.said == [
        "learner: W&B run in https://wandb.example/run",
        "learner: the W&B run could not be written (RuntimeError()); training continues",
    ]
    assert len(metrics_in(tmp_path)) == 2


def test_wandb_of_a_failed_run_is_marked_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    run = SimpleNamespace(url=None, summary={}, finish=lambda exit_code: codes.append(exit_code))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    for status in ("done", "interrupted", "failed"):
        Reporting(tmp_path, wandb="a-project").sinks.close({"status": status})
    assert codes == [0, 0, 1]


def test_wandb_that_is_not_installed_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"report.wandb needs .* pip install 'seedrl\[wandb\]'"):
        Reporting(tmp_path, wandb="a-project")
