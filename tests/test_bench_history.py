"""`seedrl bench guard`: what is compared with earlier nights, and what becomes part of the history."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.harness import Ratio
from bench.history import guard, read_history
from seedrl.errors import ConfigError
from tests.test_bench_compare import HIGH, LOW, results


def night(tmp_path: Path, values: list[float], **machine: Any) -> int:
    """Guard one more night with these repeats of a ratio of which less is better; return the exit code."""
    return guard(tmp_path / "history.jsonl", results(tmp_path / "new.json", Ratio("cost", values), **machine))


def lengths(tmp_path: Path) -> list[int]:
    return [len(each.ratios["cost"].values) for each in read_history(tmp_path / "history.jsonl")]


def test_first_night_begins_the_history(tmp_path: Path) -> None:
    assert night(tmp_path, LOW) == 0
    assert lengths(tmp_path) == [5]


def test_worse_night_fails_and_is_not_added(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert night(tmp_path, LOW) == 0
    assert night(tmp_path, HIGH) == 1
    assert "worse: cost; the history stays as it is" in capsys.readouterr().out
    assert lengths(tmp_path) == [5]
    assert night(tmp_path, HIGH) == 1  # again: it has not become the new normal
    assert night(tmp_path, LOW) == 0


def test_few_repeats_are_enough_once_the_history_has_many(tmp_path: Path) -> None:
    """Three against five repeats cannot be sure; three against fifteen can."""
    for _ in range(3):
        assert night(tmp_path, LOW) == 0
    assert night(tmp_path, HIGH[:3]) == 1


def test_only_nights_of_the_same_machine_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert night(tmp_path, LOW) == 0
    assert night(tmp_path, HIGH, cpu="another") == 0
    assert "compared with 0 earlier runs" in capsys.readouterr().out
    assert night(tmp_path, HIGH) == 1


def test_only_the_last_five_nights_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(7):
        assert night(tmp_path, LOW) == 0
    capsys.readouterr()
    assert night(tmp_path, LOW) == 0
    assert "compared with 5 earlier runs" in capsys.readouterr().out


def test_history_that_is_damaged_is_refused_by_its_line(tmp_path: Path) -> None:
    assert night(tmp_path, LOW) == 0
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write(json.dumps({"a": 1})[:-1] + "\n")
    with pytest.raises(ConfigError, match=r"history\.jsonl, line 2 is no JSON"):
        night(tmp_path, LOW)
