"""Simulations with several players, for threads and for processes, which import this module.

env.id=tests.games:Duel env.players=2 makes one.
"""

from typing import Any

import numpy as np

from seedrl.specs import MASK, ArraySpec, discrete

PAYOFF = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]])  # of rock, paper, scissors against them


class Duel:
    """Rock, paper, scissors, all players at once; everybody sees the moves of the round before."""

    players = 2
    observation_space: Any = ArraySpec((2,), "float32")
    action_space: Any = discrete(3)

    def __init__(self, rounds: int = 2) -> None:
        self._rounds = rounds
        self._played = 0

    def reset(self, seed: int | None = None) -> tuple[dict[int, Any], dict[int, Any]]:
        self._played = 0
        return {player: np.full(2, -1, np.float32) for player in range(2)}, {}

    def step(self, actions: dict[int, Any]) -> tuple[Any, ...]:
        self._played += 1
        moves = np.array([actions[0], actions[1]], np.float32)
        score = int(PAYOFF[int(actions[0]), int(actions[1])])
        is_over = self._played == self._rounds
        return {0: moves, 1: moves[::-1]}, {0: score, 1: -score}, is_over, False, {}


class Countdown:
    """Players take 1 or 2 of `stones` in turn; the one who takes the last gets 1, the others -1. One left: 2 is masked.

    A player that takes two gets 0.25, and everybody else loses that at once.
    """

    observation_space: Any = ArraySpec((1,), "float32")
    action_space: Any = discrete(2)

    def __init__(self, stones: int = 5, players: int = 2, ending: str = "terminated", trouble: str = "") -> None:
        self.players, self._stones, self._ending, self._trouble = players, stones, ending, trouble
        self._left, self._turn = stones, 0

    def reset(self, seed: int | None = None) -> tuple[dict[int, Any], dict[int, Any]]:
        self._left, self._turn = self._stones, 0
        return self._seen(0)

    def step(self, actions: dict[int, Any]) -> tuple[Any, ...]:
        ((player, action),) = actions.items()
        assert player == self._turn
        taken = int(action) + 1
        assert taken <= self._left, "a masked choice"
        self._left -= taken
        self._turn = (player + 1) % self.players
        is_over = self._left == 0
        prize = (1.0 if is_over else 0.0) + (0.25 if taken == 2 else 0.0)
        rewards = {each: prize if each == player else -prize for each in range(self.players)}
        seen, infos = self._seen(*(range(self.players) if is_over else [self._turn]))
        if self._trouble == "names":
            rewards = {f"player {number}": reward for number, reward in rewards.items()}  # type: ignore[misc]
        if self._trouble == "nothing":
            seen = {}
        return seen, rewards, is_over and self._ending == "terminated", is_over and self._ending == "truncated", infos

    def _seen(self, *players: int) -> tuple[dict[int, Any], dict[int, Any]]:
        mask = np.array([1, self._left != 1], np.int8)
        return {each: np.array([self._left], np.float32) for each in players}, {each: {MASK: mask} for each in players}
