"""What is declared, how it is counted, and how Prometheus reads it."""

import math
import re
import timeit
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from seedrl.errors import ConfigError
from seedrl.metrics import (
    GROUPS,
    MOST_REPORTED,
    ActorMetrics,
    Histogram,
    Kind,
    LearnerState,
    LearningMetrics,
    ReportedValues,
    ServingMetrics,
    Stopwatch,
    declared,
    restore_totals,
    totals_of,
)
from seedrl.monitoring.exposition import Exposition
from seedrl.monitoring.reference import reference

ROOT = Path(__file__).parents[1]
BOUNDS = (-1.0, 0.0, 0.5, 10.0)


def samples(*groups: ServingMetrics | LearningMetrics | LearnerState | ActorMetrics) -> dict[tuple[str, str], float]:
    """(name, labels) → value, as a scraper reads them."""
    families = text_string_to_metric_families(Exposition(*groups).text().decode())
    return {
        (sample.name, ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def reporting_all() -> LearningMetrics:
    """Metrics of an algorithm that reports as many values as it may."""
    learning = LearningMetrics()
    learning.algorithm.update({f"value_{number}": float(number) for number in range(MOST_REPORTED)})
    return learning


# Declarations


def test_metrics_names_are_declared_once_and_follow_the_conventions() -> None:
    names = [name for group in GROUPS for name, _ in declared(group)]
    assert len(names) == len(set(names))
    assert [name for name in names if not re.fullmatch(r"[a-z][a-z_]*[a-z]", name) or name.endswith("_total")] == []


def test_metrics_all_say_what_they_mean() -> None:
    for group in GROUPS:
        for name, declaration in declared(group):
            assert len(declaration.meaning) > 8, name
            assert not declaration.meaning.endswith("."), name


def test_metrics_labels_are_bounded_and_their_values_exist_from_the_start() -> None:
    for group in GROUPS:
        for name, declaration in declared(group):
            assert declaration.label or not declaration.values, name
            if declaration.values:
                assert tuple(getattr(group(), name)) == declaration.values


def test_metrics_label_that_is_not_declared_cannot_be_counted() -> None:
    with pytest.raises(KeyError):
        ServingMetrics().rows_dropped["whatever a peer says"] += 1


def test_metrics_only_what_an_algorithm_reports_has_names_from_run_time() -> None:
    unnamed = [name for group in GROUPS for name, each in declared(group) if each.label and not each.values]
    assert unnamed == ["algorithm"]


def test_reported_values_are_set_by_name_and_kept_until_the_next_report() -> None:
    reported = ReportedValues()
    reported.update({"td_error": 0.5, "q_1": 2.0})
    reported.update({"td_error": 0.25})
    assert dict(reported) == {"td_error": 0.25, "q_1": 2.0}


@pytest.mark.parametrize("name", ["", "Loss", "td error", "a/b", 'x"} 1'])
def test_reported_name_that_cannot_be_a_label_is_refused(name: str) -> None:
    reported = ReportedValues()
    with pytest.raises(ConfigError, match="a-z, 0-9 and _"):
        reported.update({"fine": 1.0, name: 1.0})
    assert not reported


def test_reported_names_are_bounded_over_all_reports() -> None:
    reported = ReportedValues()
    for number in range(MOST_REPORTED):
        reported.update({f"value_{number}": 0.0})
    with pytest.raises(ConfigError, match=f"at most {MOST_REPORTED}"):
        reported.update({"one_more": 0.0})
    assert len(reported) == MOST_REPORTED


def test_reported_values_can_be_read_while_a_name_is_added() -> None:
    reported = ReportedValues()
    reported.update({"first": 1.0, "second": 2.0})
    reader = iter(reported.items())
    found = [next(reader)]
    reported.update({"third": 3.0})
    assert [*found, *reader] == [("first", 1.0), ("second", 2.0)]


def test_metrics_reference_in_docs_is_what_the_declarations_give() -> None:
    assert (ROOT / "docs/metrics.md").read_text() == reference(), "run `make reference`"


# Counting


@given(st.lists(st.floats(-20, 20), max_size=50))
def test_histogram_counts_each_value_below_the_first_bound_that_holds_it(values: list[float]) -> None:
    histogram = Histogram(BOUNDS)
    for value in values:
        histogram.observe(value)
    for at, bound in enumerate(BOUNDS):
        assert sum(histogram.counts[: at + 1]) == sum(value <= bound for value in values)
    assert histogram.count == len(values)
    assert histogram.sum == pytest.approx(sum(values), abs=1e-9)


@given(st.lists(st.integers(-20, 20), min_size=1, max_size=80))
def test_histogram_of_many_at_once_equals_one_by_one(values: list[int]) -> None:
    one_by_one, at_once = Histogram(BOUNDS), Histogram(BOUNDS)
    for value in values:
        one_by_one.observe(value)
    at_once.observe_all(np.array(values))
    assert at_once == one_by_one


def test_stopwatch_laps_add_up_to_the_time_between_first_and_last() -> None:
    spent = {"a": 0.0, "b": 1.0}
    timer = Stopwatch(spent)
    began = timer.last
    timer.lap("a")
    end = timer.lap("b")
    assert sum(spent.values()) - 1.0 == pytest.approx(end - began)


def test_totals_restored_into_other_buckets_or_labels_start_at_zero() -> None:
    saved = totals_of(ServingMetrics())
    saved["batch_rows"] = {"counts": [1, 2], "sum": 5.0}
    saved["rows_dropped"] = {"partial_unroll": 3, "a reason of an older version": 9}
    metrics = ServingMetrics()
    restore_totals(metrics, saved)
    assert metrics.batch_rows.count == 0
    assert metrics.rows_dropped == {"session_ended": 0, "partial_unroll": 3}


# What a scraper reads


def test_exposition_gives_counters_gauges_labels_and_words() -> None:
    serving = ServingMetrics(env_steps=7)
    serving.rows_dropped["partial_unroll"] = 3
    state = LearnerState(ready=1.0, return_mean=math.nan, run_info={"env": 'Pong "v5"\\'})
    found = samples(serving, state)
    assert found["seedrl_env_steps_total", ""] == 7
    assert found["seedrl_rows_dropped_total", "reason=partial_unroll"] == 3
    assert found["seedrl_rows_dropped_total", "reason=session_ended"] == 0
    assert found["seedrl_ready", ""] == 1
    assert math.isnan(found["seedrl_return_mean", ""])
    assert found["seedrl_run_info", 'env=Pong "v5"\\'] == 1


def test_exposition_gives_histograms_cumulated() -> None:
    serving = ServingMetrics()
    for rows in (1, 3, 4, 10_000):
        serving.batch_rows.observe(rows)
    found = samples(serving)
    assert found["seedrl_batch_rows_bucket", "le=1"] == 1
    assert found["seedrl_batch_rows_bucket", "le=4"] == 3
    assert found["seedrl_batch_rows_bucket", "le=4096"] == 3
    assert found["seedrl_batch_rows_bucket", "le=+Inf"] == found["seedrl_batch_rows_count", ""] == 4
    assert found["seedrl_batch_rows_sum", ""] == 10_008


def test_exposition_has_every_declared_metric_and_the_process() -> None:
    found = samples(ServingMetrics(), reporting_all(), LearnerState(), ActorMetrics())
    assert found["seedrl_algorithm", "value=value_7"] == 7.0
    names = {name for name, _ in found}
    for group in GROUPS:
        for name, declaration in declared(group):
            suffix = {Kind.counter: "_total", Kind.histogram: "_count"}.get(declaration.kind, "")
            assert f"seedrl_{name}{suffix}" in names
    assert "process_resident_memory_bytes" in names


def test_exposition_of_a_learner_has_at_most_500_series() -> None:
    """C12: whatever the number of actors and environments, for no label tells them apart."""
    assert len(samples(ServingMetrics(), reporting_all(), LearnerState())) <= 500


def test_exposition_of_a_learner_is_made_within_50_ms() -> None:
    """C12: the best of some, which is what it costs; the page is made once for all who ask within a moment."""
    exposition = Exposition(ServingMetrics(), LearningMetrics(), LearnerState())
    assert min(timeit.repeat(exposition.text, number=1, repeat=10)) <= 0.05


def test_exposition_looks_at_the_state_before_every_text() -> None:
    state = LearnerState()

    def refresh() -> None:
        state.sessions_open += 1

    exposition = Exposition(state, refresh=refresh)
    texts = [exposition.text().decode() for _ in range(2)]
    assert "seedrl_sessions_open 1.0" in texts[0]
    assert "seedrl_sessions_open 2.0" in texts[1]
