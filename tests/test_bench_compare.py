"""`seedrl bench compare`: what counts as better or worse, and what it refuses."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from bench.compare import BETTER, SAME, UNSURE, WORSE, Change, compare, rank_test, smallest_p
from bench.harness import Ratio, Report, write
from seedrl.errors import ConfigError
from tests.integration.processes import Commands

QUIET = {"cpu": "a", "cores": 2, "platform": "p", "python": "3", "load": 0.1, "versions": {"torch": "2"}}
LOW = [1.00, 1.01, 1.02, 1.03, 1.04]
HIGH = [1.30, 1.31, 1.32, 1.33, 1.34]


def results(path: Path, *ratios: Ratio, **machine: Any) -> Path:
    report = Report("stage", machine={**QUIET, **machine})
    for ratio in ratios:
        report.add_ratio(ratio)
    write(path, [report])
    return path


# Verdicts.


@pytest.mark.parametrize(
    ("before", "after", "at_most", "verdict"),
    [
        (LOW, HIGH, True, WORSE),
        (LOW, HIGH, False, BETTER),
        (HIGH, LOW, True, BETTER),
        (HIGH, LOW, False, WORSE),
        (LOW, LOW, True, SAME),
        ([1.0, 1.1, 1.2, 1.3, 1.4], [1.1, 1.2, 1.3, 1.4, 1.5], True, SAME),  # overlapping
        (LOW, [value * 1.001 + 0.04 for value in [1.0] * 5], True, WORSE),  # by 2 % and more
        ([1.0, 1.001, 1.002, 1.003, 1.004], [1.01, 1.011, 1.012, 1.013, 1.014], True, SAME),  # sure, but too little
        (LOW[:3], HIGH[:3], True, UNSURE),
        ([1.0], [5.0], True, UNSURE),
    ],
)
def test_verdict_needs_a_change_that_is_sure_and_matters(
    before: list[float], after: list[float], at_most: bool, verdict: str
) -> None:
    assert Change(Ratio("r", before, at_most=at_most), Ratio("r", after, at_most=at_most)).verdict == verdict


def test_rank_test_of_separate_sides_is_as_sure_as_so_few_repeats_can_be() -> None:
    assert rank_test(LOW, HIGH) == pytest.approx(smallest_p(5, 5)) == pytest.approx(2 / 252)


def test_rank_test_of_equal_values_finds_nothing() -> None:
    assert rank_test([1.0] * 5, [1.0] * 5) == 1.0


def test_rank_test_agrees_with_counting_by_hand() -> None:
    """U statistics of all 20 ways to choose three of six values."""
    a, b = [1.0, 2.0, 5.0], [3.0, 4.0, 6.0]
    values = sorted(a + b)
    sums = [sum(values.index(value) + 1 for value in chosen) for chosen in itertools.combinations(values, 3)]
    as_extreme = [total for total in sums if abs(total - 10.5) >= abs(8 - 10.5)]
    assert rank_test(a, b) == pytest.approx(len(as_extreme) / 20)


def test_rank_test_of_many_repeats_samples_the_orders_and_repeats_itself() -> None:
    many = [1 + 0.001 * number for number in range(20)]
    shifted = [value + 0.5 for value in many]
    assert rank_test(many, shifted) < 0.001
    assert rank_test(many, many[::-1]) == rank_test(many, many[::-1]) > 0.9


# What it prints and how it ends.


def test_compare_something_worse_ends_with_1_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = results(tmp_path / "a.json", Ratio("service_over_echo", LOW, bound=1.5), Ratio("same", LOW))
    b = results(tmp_path / "b.json", Ratio("service_over_echo", HIGH, bound=1.5), Ratio("same", LOW))
    capsys.readouterr()
    assert compare(a, b) == 1
    out = capsys.readouterr().out
    assert "1.02 (1…1.04, 5)" in out
    assert "+29.4 %" in out
    assert out.endswith("worse: service_over_echo\n")
    assert "warning" not in out


def test_compare_nothing_worse_ends_with_0_and_lists_what_only_one_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = results(tmp_path / "a.json", Ratio("x", HIGH, bound=2), Ratio("gone", LOW))
    b = results(tmp_path / "b.json", Ratio("x", LOW, bound=2), Ratio("new", LOW))
    assert compare(a, b) == 0
    out = capsys.readouterr().out
    assert f"only in {a}: gone\n" in out
    assert f"only in {b}: new\n" in out
    assert out.endswith("nothing is worse\n")


def test_compare_direction_of_a_ratio_without_bound_is_kept(tmp_path: Path) -> None:
    a = results(tmp_path / "a.json", Ratio("work", HIGH, at_most=False))
    b = results(tmp_path / "b.json", Ratio("work", LOW, at_most=False))
    assert compare(a, b) == 1
    assert compare(b, a) == 0


def test_compare_suite_with_a_stage_uses_the_stages_ratios(tmp_path: Path) -> None:
    one, two = (Report(name, machine=QUIET) for name in ("one", "two"))
    one.add_ratio(Ratio("x", LOW))
    two.add_ratio(Ratio("y", LOW))
    write(tmp_path / "suite.json", [one, two])
    assert compare(tmp_path / "suite.json", results(tmp_path / "y.json", Ratio("y", HIGH))) == 1


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"cpu": "b"}, "cpu differs: a before, b after"),
        ({"versions": {"torch": "3"}}, "torch differs: 2 before, 3 after"),
        ({"load": 1.9}, "busy after: load 1.9 on 2 cores"),
    ],
)
def test_compare_other_machine_or_high_load_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], machine: dict[str, Any], words: str
) -> None:
    compare(results(tmp_path / "a.json", Ratio("x", LOW)), results(tmp_path / "b.json", Ratio("x", LOW), **machine))
    assert words in capsys.readouterr().out


# Refusing.


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        ("not json", "is no JSON"),
        ("[]", "holds no results"),
        ('{"ratios": {"x": 1}}', "holds no results"),
        ('{"fingerprint": {}, "ratios": 3}', "holds no results"),
        (json.dumps({"fingerprint": {}, "ratios": {"x": 1}, "repeats": {"x": []}}), "holds no results"),
    ],
)
def test_compare_file_without_results_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    bad = tmp_path / "bad.json"
    if content is not None:
        bad.write_text(content)
    with pytest.raises(ConfigError, match=words):
        compare(results(tmp_path / "a.json", Ratio("x", LOW)), bad)


def test_compare_command_missing_file_ends_with_2_and_one_line(commands: Commands) -> None:
    code, _, err = commands.run("bench", "compare", "a.json", "b.json")
    assert code == 2
    assert err.startswith("seedrl bench: a.json cannot be read")
    assert err.count("\n") == 1


def test_compare_command_worse_ends_with_1(commands: Commands) -> None:
    results(commands.directory / "a.json", Ratio("x", LOW))
    results(commands.directory / "b.json", Ratio("x", HIGH))
    code, out, err = commands.run("bench", "compare", "a.json", "b.json")
    assert (code, err) == (1, "")
    assert out.endswith("worse: x\n")


@pytest.mark.parametrize("words", [["compare"], ["compare", "a.json"], ["render"]])
def test_files_command_wrong_number_of_files_is_refused(commands: Commands, words: list[str]) -> None:
    code, _, err = commands.run("bench", *words)
    assert code == 2
    assert "files; seedrl bench --help" in err
