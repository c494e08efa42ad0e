"""The signs of trouble in the numbers that an algorithm reports. Knows nothing of how numbers are collected or shown.

An algorithm may have an attribute `signs`, which monitoring reads (seedrl/monitoring/judgement.py); so nothing outside
of this package has to know the parts of a loss.
"""

import math
from dataclasses import dataclass
from typing import Any

IF_FLAT = "Raise algorithm.learning_rate, or lower it if the numbers that the algorithm reports jump."


@dataclass(frozen=True, slots=True)
class Sign:
    """A number outside of its range for a long time, what that means, and the one setting to try."""

    value: str  # the name of the number in the report
    condition: str  # in one to three words, such as "entropy gone"
    meaning: str  # a sentence without its period; {value} stands for the number
    change: str  # a sentence that names one setting in full
    below: float = -math.inf  # a number below this is a bad sign
    above: float = math.inf  # a number above this is a bad sign
    is_urgent: bool = False  # it is trouble even if it is too early to judge the return
    is_ceiling: bool = False  # it also keeps a return that has risen from rising further

    def is_bad(self, value: float) -> bool:
        return value < self.below or value > self.above


@dataclass(frozen=True, slots=True)
class Signs:
    """The signs of trouble of an algorithm, worst first."""

    numbers: tuple[Sign, ...] = ()
    if_flat: str = IF_FLAT  # what to try if the return does not rise and no number tells why


def signs_of(algorithm: Any) -> Signs:
    """Return the signs that an algorithm declares; one of your own need not declare any."""
    signs: Signs = getattr(algorithm, "signs", Signs())
    return signs
