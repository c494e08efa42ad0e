"""The course of a run's return: rising, settled, flat or falling. Pure; knows nothing of algorithms or settings.

The steps so far are divided into blocks of equal length, and the value of a block is the mean return of the episodes
that ended in it, so that no two blocks share an episode. Whether the blocks of the second half rise or fall is tested
by ranks (Mann 1945), and so is whether they lie above the first ones (Mann and Whitney 1947). Ranks assume nothing
about the scale or the distribution of returns, and one extraordinary block cannot decide.
"""

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCKS = 24
EPISODES = 4  # that a block needs; otherwise it is joined with the next one
LEAST, FIRST = 6, 2  # recent and first blocks, without which nothing is said; earlier ones count as recent if need be
TELLING = 12  # blocks, without which none is called flat: a rise might just not be seen
SURE = 2.33  # standard deviations; chance alone exceeds them once in a hundred times
LOST = 0.4  # the share of what was gained that has to be lost again before the return is called falling
NEEDED = ("env_steps", "returns", "return_sum")  # columns of a row

Values = NDArray[np.float64]
Rows = Sequence[Mapping[str, float]]


class Course(Enum):
    unknown = "unknown"  # too few episodes
    rising = "rising"
    settled = "settled"  # above its start, and neither rising nor falling now
    flat = "flat"  # where it started
    falling = "falling"  # from its best, or below its start


class Trend(NamedTuple):
    course: Course
    before: float = math.nan  # mean return at the beginning of the window; of the best or first blocks if it is falling
    now: float = math.nan  # mean return at its end
    steps: int = 0  # of the window


def trend_of(rows: Rows) -> Trend:
    """Return the trend of rows in the order of their steps; those without returns are left out."""
    ends, values = blocks_of(rows)
    if len(values) < LEAST + FIRST:
        return Trend(Course.unknown)
    steps = int(ends[-1])
    count = max(LEAST, int((ends > steps / 2).sum()))
    recent, window = values[-count:], steps - int(ends[-count - 1])
    third = count // 3
    before, now = float(recent[:third].mean()), float(recent[-third:].mean())
    first = values[: max(FIRST, len(values) // 4)]
    slope = rank_trend(recent)
    if slope > SURE and now > before:
        return Trend(Course.rising, before, now, window)
    start, best = float(first.mean()), _best(values, third)
    rise = [rank_difference(first, recent), rank_trend(values)]  # since the beginning; the latter needs fewer blocks
    is_above = max(rise) > SURE
    if is_above and best - now < LOST * (best - start):
        return Trend(Course.settled, start, now, window)
    if is_above or min(slope, *rise) < -SURE:
        return Trend(Course.falling, max(best, start), now, steps)
    return Trend(Course.flat, start, now, steps) if len(values) >= TELLING else Trend(Course.unknown)


def blocks_of(rows: Rows, count: int = BLOCKS) -> tuple[Values, Values]:
    """Return the steps at which blocks end, and the mean return of the episodes of each."""
    known = [[row[name] for name in NEEDED] for row in rows if all(name in row for name in NEEDED)]
    points = np.array([[0.0] * len(NEEDED), *known])
    steps = points[:, 0]
    chosen = np.searchsorted(steps, np.linspace(0, steps[-1], count + 1)[1:], side="right") - 1
    ends, values, begin = [], [], points[0]
    for end in points[chosen]:
        _, episodes, total = end - begin
        if episodes >= EPISODES:
            ends.append(end[0])
            values.append(total / episodes)
            begin = end
    return np.array(ends), np.array(values)


def rank_trend(values: Values) -> float:
    """Return Mann's statistic in standard deviations: above 0 if later values tend to be larger than earlier ones."""
    count = len(values)
    later = np.sign(values[None, :] - values[:, None])
    score = float(np.triu(later, 1).sum())
    return _standardized(score, count * (count - 1) * (2 * count + 5) / 18)


def rank_difference(first: Values, second: Values) -> float:
    """Return Mann and Whitney's statistic in standard deviations: above 0 if the second values tend to be larger."""
    score = float(np.sign(second[None, :] - first[:, None]).sum())
    return _standardized(score, len(first) * len(second) * (len(first) + len(second) + 1) / 3)


def _standardized(score: float, variance: float) -> float:
    return math.copysign(max(0.0, abs(score) - 1) / math.sqrt(variance), score) if variance else 0.0


def _best(values: Values, width: int) -> float:
    """Return the largest mean of consecutive blocks; single ones may be lucky."""
    return float(np.convolve(values, np.full(width, 1 / width), "valid").max())
