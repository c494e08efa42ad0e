"""The seat of each slot: which policy acts there, whether it is trained on, how it explores.

Evaluation is a seat that is greedy and not trained on. Knows nothing of sessions or of how actions are drawn.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seedrl.config import ActorsConfig
from seedrl.sizes import evaluation_envs

Slots = NDArray[np.int64]


class Exploration(NamedTuple):
    """The way in which actions are drawn; see Actions.explored. Temperature 0 takes the most likely action."""

    temperature: float = 1.0
    epsilon: float = 0.0

    def changed(self, temperature: float | None, epsilon: float | None) -> "Exploration":
        """Return the same with other values where they are given."""
        return Exploration(
            self.temperature if temperature is None else temperature, self.epsilon if epsilon is None else epsilon
        )


ON_POLICY = Exploration()
GREEDY = Exploration(temperature=0.0)
CURRENT = "current"  # the policy that is being trained


class Seat(NamedTuple):
    """The record of one slot. Rows of a seat that is not trained on are counted as evaluation."""

    policy: str = CURRENT
    is_trained: bool = True
    exploration: Exploration = ON_POLICY


EVALUATION = Seat(is_trained=False, exploration=GREEDY)


def planned_seats(actors: ActorsConfig) -> list[Seat]:
    """Return the seats of an actor's environments in a training run."""
    seats = [Seat()] * actors.envs
    for env in evaluation_envs(actors):
        seats[env] = EVALUATION
    return seats


class Seats:
    """The seats of all slots, as columns. Owned by the server thread."""

    def __init__(self, count: int) -> None:
        self.is_trained = np.ones(count, np.bool_)
        self.temperature = np.full(count, ON_POLICY.temperature, np.float32)
        self.epsilon = np.full(count, ON_POLICY.epsilon, np.float32)
        self._note_common_cases()

    def assign(self, slots: Slots, seats: Sequence[Seat]) -> None:
        """Give slots the seats of a new session."""
        self.is_trained[slots] = [seat.is_trained for seat in seats]
        self.temperature[slots] = [seat.exploration.temperature for seat in seats]
        self.epsilon[slots] = [seat.exploration.epsilon for seat in seats]
        self._note_common_cases()

    def explore(self, slots: Slots, temperature: float | None, epsilon: float | None) -> None:
        """Change how slots explore, where values are given; greedy slots stay greedy."""
        changing = slots[self.temperature[slots] != GREEDY.temperature]
        if temperature is not None:
            self.temperature[changing] = temperature
        if epsilon is not None:
            self.epsilon[changing] = epsilon
        self._note_common_cases()

    def _note_common_cases(self) -> None:
        """Most runs have neither evaluation nor exploration, and then nothing is asked per row."""
        self.all_trained = bool(self.is_trained.all())
        self.any_greedy = bool((self.temperature == GREEDY.temperature).any())
        explores = (self.temperature != ON_POLICY.temperature) | (self.epsilon != ON_POLICY.epsilon)
        self.any_explores = bool((explores & (self.temperature > 0)).any())
