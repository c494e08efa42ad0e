"""The seat of each slot: which policy acts there, whether it is trained on, how it explores.

Evaluation is a seat that is greedy and not trained on. Knows nothing of sessions or of how actions are drawn.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from seedrl.config import ExplorationConfig, LearnerConfig
from seedrl.sizes import evaluation_envs, opponent_envs, trained_envs

Slots = NDArray[np.int64]

NOTHING_DIFFERS = np.zeros((4, 0), np.float32)
POINTS = 1000  # of a run at which scheduled values change


class Exploration(NamedTuple):
    """The way in which actions are drawn; see Actions.explored. Temperature 0 takes the most likely action."""

    temperature: float = 1.0
    epsilon: float = 0.0


ON_POLICY = Exploration()
GREEDY = Exploration(temperature=0.0)
CURRENT, OPPONENT = "current", "opponent"  # the policy that is being trained; an entry of the bank, chosen per game


class Order(NamedTuple):
    """The exploration that `seedrl control` asks for; None leaves a value to the settings."""

    temperature: float | None = None
    epsilon: float | None = None

    def changed(self, temperature: float | None, epsilon: float | None) -> "Order":
        """Return the same with other values where they are given."""
        return Order(
            self.temperature if temperature is None else temperature, self.epsilon if epsilon is None else epsilon
        )


NO_ORDER = Order()


class Schedule(NamedTuple):
    """Epsilon over a run: linear from `start` to `end`, which it reaches at the fraction `decay`."""

    start: float = 0.0
    end: float = 0.0
    decay: float = 1.0

    @classmethod
    def of(cls, config: ExplorationConfig) -> "Schedule":
        return cls(config.epsilon, config.epsilon if config.epsilon_end is None else config.epsilon_end, config.decay)

    def at(self, fraction: float) -> float:
        """Return epsilon when this fraction of the run is over."""
        share = min(max(fraction / self.decay, 0.0), 1.0)
        return (1 - share) * self.start + share * self.end


CONSTANT = Schedule()


class Seat(NamedTuple):
    """The record of one slot. Rows of a seat that is neither trained on nor an opponent's count as evaluation."""

    policy: str = CURRENT
    is_trained: bool = True
    exploration: Exploration = ON_POLICY
    exponent: float | None = None  # if given, epsilon is the scheduled one to this power


EVALUATION = Seat(is_trained=False, exploration=GREEDY)
OPPONENTS = Seat(OPPONENT, is_trained=False)


def planned_seats(config: LearnerConfig) -> list[Seat]:
    """Return the seats of an actor's environments in a training run; those that are trained on form the ladder."""
    own, evaluating, opponents = config.exploration, set(evaluation_envs(config)), set(opponent_envs(config))
    last = max(1, trained_envs(config) - 1)
    seats, rung = [EVALUATION] * config.actors.envs, 0
    for env in range(config.actors.envs):
        if env in opponents:
            seats[env] = OPPONENTS
        elif env not in evaluating:
            exponent = 1 + own.ladder * rung / last
            seats[env] = Seat(exploration=Exploration(own.temperature, own.epsilon**exponent), exponent=exponent)
            rung += 1
    return seats


def final_exploration(config: ExplorationConfig) -> Exploration:
    """Return how a trained policy acts that is not greedy: as in training, at the end of the schedule."""
    return Exploration(config.temperature, Schedule.of(config).at(1.0))


class Seats:
    """The seats of all slots, as columns, that of the spare slot included. Owned by the server thread."""

    def __init__(self, count: int, schedule: Schedule = CONSTANT, players: int = 1) -> None:
        count += 1
        self.is_trained = np.ones(count, np.bool_)
        self.is_opponent = np.zeros(count, np.bool_)
        self.entry = np.zeros(count, np.int64)  # number of the bank's entry that acts; 0 for the current policy
        self.rivals = np.zeros((count, players - 1), np.int64)  # slots of the other players of the simulation
        self.temperature = np.full(count, ON_POLICY.temperature, np.float32)
        self.epsilon = np.full(count, ON_POLICY.epsilon, np.float32)
        self._exponent = np.full(count, np.nan)  # of the scheduled epsilon; nan where epsilon stays as it is
        self._schedule = schedule
        self._scheduled = schedule.at(0.0)  # epsilon by now
        self.is_moving = schedule.start != schedule.end
        self._note_common_cases()

    def assign(self, slots: Slots, seats: Sequence[Seat]) -> None:
        """Give slots the seats of a new session."""
        self.is_trained[slots] = [seat.is_trained for seat in seats]
        self.is_opponent[slots] = [seat.policy == OPPONENT for seat in seats]
        self.entry[slots] = 0
        others = self.rivals.shape[1]
        if others:
            games = slots.reshape(-1, others + 1)
            for player in range(others + 1):
                self.rivals[games[:, player]] = np.delete(games, player, axis=1)
        self.temperature[slots] = [seat.exploration.temperature for seat in seats]
        self.epsilon[slots] = [seat.exploration.epsilon for seat in seats]
        self._exponent[slots] = [math.nan if seat.exponent is None else seat.exponent for seat in seats]
        self._apply_schedule()

    def explore(self, slots: Slots, temperature: float | None, epsilon: float | None) -> None:
        """Change how slots explore, where values are given: no schedule changes them again. Evaluation stays greedy.

        Opponents act as they do.
        """
        changing = slots[(self.is_trained[slots] | ~self.is_greedy[slots]) & ~self.is_opponent[slots]]
        if temperature is not None:
            self.temperature[changing] = temperature
        if epsilon is not None:
            self.epsilon[changing] = epsilon
            self._exponent[changing] = math.nan
        self._note_common_cases()

    def columns(self, slots: Slots, is_needed: bool = False) -> NDArray[np.float32]:
        """Return temperature, epsilon, whether it explores and whether it is greedy [4, N].

        If none differs and it is not needed in any case, return [4, 0].
        """
        if not (self.any_explores or self.any_greedy or is_needed):
            return NOTHING_DIFFERS
        columns = (self.temperature[slots], self.epsilon[slots], self.explores[slots], self.is_greedy[slots])
        return np.stack(columns, dtype=np.float32)

    def follow(self, fraction: float) -> None:
        """Let epsilon follow its schedule; `fraction` is how much of the run is over. To be called for every batch."""
        scheduled = self._schedule.at(math.floor(fraction * POINTS) / POINTS)
        if scheduled != self._scheduled:
            self._scheduled = scheduled
            self._apply_schedule()

    def _apply_schedule(self) -> None:
        follows = ~np.isnan(self._exponent)
        self.epsilon[follows] = self._scheduled ** self._exponent[follows]
        self._note_common_cases()

    def _note_common_cases(self) -> None:
        """Most runs have neither evaluation nor exploration, and then nothing is asked per row.

        Slots that `explores` names have other logits than the policy's. What greedy evaluation records is never used.
        """
        self.is_greedy = (self.temperature == GREEDY.temperature) & (self.epsilon == GREEDY.epsilon)
        is_on_policy = (self.temperature == ON_POLICY.temperature) & (self.epsilon == ON_POLICY.epsilon)
        self.explores = ~is_on_policy & (self.is_trained | ~self.is_greedy)
        self.all_trained = bool(self.is_trained.all())
        self.any_opponents = bool(self.is_opponent.any())
        self.any_greedy = bool(self.is_greedy.any())
        self.any_explores = bool(self.explores.any())
