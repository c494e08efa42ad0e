"""Interquartile means and their intervals."""

import numpy as np

from seedrl.monitoring.statistics import band, bootstrap, iqm


def test_iqm_drops_a_quarter_at_either_end() -> None:
    assert iqm(np.array([100.0, 1.0, 2.0, 3.0, -50.0])) == 2.0
    assert iqm(np.array([5.0])) == 5.0


def test_bootstrap_interval_holds_the_mean_and_repeats_itself() -> None:
    values = np.random.default_rng(1).normal(10, 1, 20)
    low, high = bootstrap(values)
    assert low < iqm(values) < high
    assert (low, high) == bootstrap(values)
    assert bootstrap(np.array([3.0, 3.0])) == (3.0, 3.0)


def test_band_has_mean_and_interval_of_every_column() -> None:
    values = np.random.default_rng(1).normal([0.0, 5.0, 9.0], 1.0, (6, 3))
    middle, low, high = band(values)
    for column in range(3):
        assert middle[column] == iqm(values[:, column])
        assert (low[column], high[column]) == bootstrap(values[:, column])
