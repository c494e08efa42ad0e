"""The learning stage, with runs made up: how run directories are read and seeds summed up."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from bench.harness import Report, write
from bench.learning import run, settings_of, train
from seedrl.config import BenchConfig
from seedrl.errors import ConfigError

TARGETS = {"cartpole": 475.0, "catch": 0.95, "endless": None}


class FakeRuns:
    """Leaves run directories as `seedrl run` does: seed n ends with a task's n-th score after n × 1000 steps."""

    def __init__(self, scores: dict[str, list[float]]) -> None:
        self._scores = scores
        self.asked: list[list[str]] = []

    def __call__(self, settings: Sequence[str], run_dir: Path) -> None:
        self.asked.append(list(settings))
        task, seed = (setting.partition("=")[2] for setting in settings[:2])
        steps, score = 1000 * int(seed), self._scores[task][int(seed) - 1]
        target = TARGETS[task]
        goal = steps if target is None or score < target else 500_000
        rows = [
            {"env_steps": steps // 10, "seconds": 0.5, "return_mean_100": None},  # before the first episode ends
            {"env_steps": steps // 2, "seconds": steps / 2000, "return_mean_100": score / 2},
        ]
        run_dir.mkdir(exist_ok=True)
        (run_dir / "config.yaml").write_text(yaml.safe_dump({"stop": {"return_mean_100": target, "env_steps": goal}}))
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        summary = {"status": "done", "env_steps": steps, "seconds": steps / 1000, "return_mean_100": score}
        (run_dir / "summary.json").write_text(json.dumps(summary))


def learned(scores: dict[str, list[float]]) -> Report:
    (seeds,) = {len(each) for each in scores.values()}
    return run(BenchConfig(tasks=list(scores), seeds=seeds), FakeRuns(scores))


def test_run_every_task_is_trained_with_every_seed_tasks_in_turns() -> None:
    runs = FakeRuns({"cartpole": [480.0, 480.0], "catch": [0.96, 0.97]})
    run(BenchConfig(seeds=2), runs)
    assert [" ".join(asked) for asked in runs.asked] == [
        "env=cartpole seed=1",
        "env=catch seed=1",
        "env=cartpole seed=2",
        "env=catch seed=2",
    ]


def test_run_task_may_be_an_experiment_with_other_settings() -> None:
    assert settings_of("cartpole") == ["env=cartpole"]
    assert settings_of("memory model.lstm=0") == ["experiment=memory", "model.lstm=0"]


def test_run_row_says_what_every_seed_reached() -> None:
    (row,) = learned({"catch": [0.96, 0.5]}).table
    assert (row["wanted"], row["reached"], row["solved"]) == (0.95, "0.96, 0.5", "1/2")


def test_run_row_has_interquartile_means_and_intervals() -> None:
    (row,) = learned({"cartpole": [480.0] * 5}).table
    assert row["solved"] == "5/5"
    assert row["steps"] == 3000
    assert row["seconds"] == 3.0
    assert row["steps 95 %"] == "1,333…4,667"


def test_run_unsolved_seed_counts_with_all_it_took_and_is_told() -> None:
    report = learned({"cartpole": [480.0, 12.0]})
    assert report.table[0]["solved"] == "1/2"
    assert report.table[0]["steps"] == 1500
    assert "seeds [2] did not reach 475" in report.notes[0]


def test_run_curves_leave_out_what_has_no_return_and_end_with_the_summary() -> None:
    (curve,) = learned({"catch": [0.96]}).detail["curves"]
    assert curve["env_steps"] == [500, 1000]
    assert curve["returns"] == [0.48, 0.96]
    assert curve["target"] == 0.95


def test_run_task_without_a_score_to_reach_is_refused() -> None:
    with pytest.raises(ConfigError, match="tasks=endless has no score to reach"):
        learned({"endless": [1.0]})


def test_run_that_fails_says_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env=nowhere ended with code 2: .*there is no preset env=nowhere"):
        train(["env=nowhere"], tmp_path / "run")


def test_run_of_one_task_after_the_other_begins_from_it_and_counts_what_it_took() -> None:
    runs = FakeRuns({"cartpole": [480.0], "catch": [0.96]})
    (curve,) = run(BenchConfig(tasks=["cartpole then catch"], seeds=1), runs).detail["curves"]
    first, second = runs.asked
    assert first == ["env=cartpole", "seed=1"]
    assert second[:2] == ["env=catch", "seed=1"]
    assert second[2].startswith("init_from=")
    assert (curve["target"], curve["env_steps"], curve["seconds"]) == (0.95, [1500, 2000], [1.5, 2.0])


def test_run_keeps_curves_of_tasks_that_are_not_measured_again(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    write(out, [learned({"cartpole": [480.0], "catch": [0.96]})])
    report = run(BenchConfig(tasks=["catch"], seeds=1, out=str(out)), FakeRuns({"catch": [0.5]}))
    assert [(row["task"], row["reached"]) for row in report.table] == [("cartpole", "480"), ("catch", "0.5")]
    assert report.notes[0] == "measured earlier, at another commit: cartpole"


def test_run_kept_runs_are_resumed_if_interrupted_and_only_read_if_done(tmp_path: Path) -> None:
    runs = FakeRuns({"catch": [0.96, 0.97]})
    config = BenchConfig(tasks=["catch"], seeds=2, runs=str(tmp_path))
    first = run(config, runs).detail["curves"]
    _interrupt(tmp_path / "catch" / "2")
    again = run(config, runs).detail["curves"]
    assert [" ".join(asked) for asked in runs.asked] == ["env=catch seed=1", "env=catch seed=2", "env=catch seed=2"]
    assert [curve["cpu_seconds"] for curve in again] == [None, None]
    assert [{**curve, "cpu_seconds": None} for curve in first] == again


def _interrupt(run_dir: Path) -> None:
    summary = json.loads((run_dir / "summary.json").read_text())
    (run_dir / "summary.json").write_text(json.dumps({**summary, "status": "interrupted"}))
