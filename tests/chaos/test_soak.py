"""The soak's arithmetic on made-up samples, and a soak of a minute as `make soak` runs it."""

import json
from pathlib import Path

import pytest

from tests.chaos.cluster import Resources
from tests.chaos.soak import MIB, Sample, by_tenth, main, rss_slope


def samples(seconds: int = 3600, growth: float = 0.0, slower: float = 0.0) -> list[Sample]:
    """A look every 10 s; memory grows by `growth` an hour, the second half is `slower` by a share."""
    result, updates = [], 0.0
    for second in range(0, seconds + 1, 10):
        learner = Resources(int(300 * MIB * (1 + growth * second / 3600)), 20, 12, second / 4)
        result.append(Sample(float(second), updates, 60 * updates, learner, [Resources(60 * MIB, 9, 9, 1.0)]))
        updates += 300 * (1 - slower if second >= seconds / 2 else 1)
    return result


def test_rss_slope_is_the_growth_per_hour_as_a_share() -> None:
    assert rss_slope(samples()) == pytest.approx(0)
    assert rss_slope(samples(growth=0.02)) == pytest.approx(0.02, rel=0.05)


def test_tenths_show_a_second_half_that_is_slower() -> None:
    rates = [tenth["updates_per_second"] for tenth in by_tenth(samples(slower=0.1))]
    assert rates == [30.0] * 5 + [27.0] * 5
    assert by_tenth(samples())[0]["learner_cpu_microseconds_per_step"] == pytest.approx(1e6 * 0.25 / 1800, abs=0.1)


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_soak_of_a_minute_leaves_a_report_a_page_and_a_plot(tmp_path: Path) -> None:
    main("minutes=1", "pause=10", f"out={tmp_path}")
    report = json.loads((tmp_path / "soak.json").read_text())
    assert report["faults"] == 5
    assert len(report["tenths"]) == 10
    wrong = [words for words in report["broken"] if "promised" not in words]  # figures of a minute say little
    assert wrong == []
    assert "soak.png" in (tmp_path / "soak.md").read_text()
    assert (tmp_path / "soak.png").stat().st_size > 10_000
