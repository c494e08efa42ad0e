"""Interquartile means over seeds and their bootstrap 95 % intervals. Knows nothing of runs, tasks or plots.

Agarwal et al. 2021, "Deep RL at the Edge of the Statistical Precipice".
"""

import numpy as np

RESAMPLES = 10_000


def iqm(values: np.ndarray) -> np.ndarray:
    """Return the interquartile mean along the last axis: a quarter of the values, rounded down, is cut at each end."""
    count = values.shape[-1]
    cut = count // 4
    middle: np.ndarray = np.sort(values, axis=-1)[..., cut : count - cut].mean(axis=-1)
    return middle


def bootstrap(values: np.ndarray, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Return the 95 % percentile interval of the interquartile mean; equal values always give the same interval."""
    count = len(values)
    chosen = np.random.default_rng(1).integers(0, count, (resamples, count))
    low, high = np.quantile(iqm(values[chosen]), [0.025, 0.975])
    return float(low), float(high)


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the interquartile mean and the interval, low and high, of every column of [runs, points]."""
    intervals = np.array([bootstrap(column) for column in values.T])
    return iqm(values.T), intervals[:, 0], intervals[:, 1]
