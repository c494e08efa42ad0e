"""envpool's board games as a pool of players who move in turn. Knows nothing of streams, nor how envpool is made.

envpool steps a game with one action, and returns the observation and the reward of every player after every move.
A row is sent only for the player whose turn it is: with what that player got since its last row, and with the choices
that are allowed. When a game ends, every player that has moved gets a last row.

envpool returns games with several players in the order in which its threads finish them, even where it has all of them.
Rows are sent in the order of games, so that nothing about a run depends on that race.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs_server.masks import beside_mask, with_mask
from envs_server.spaces import ActionSpace, ObservationSpace, spec_of
from seedrl.rows import RESET, TERMINATED, TRUNCATED, Rows
from seedrl.specs import Arrays, ArraySpec, tree_map

LEGAL = "legal_action_mask"  # envpool's name in info
TURN = "current_player"


class BoardGamePool:
    """`recv` and `send` may be called from two threads. Player p of game g is environment g * players + p."""

    def __init__(self, envs: Any, env_id: str, games: int, players: int) -> None:
        self._envs = envs
        observation, action = envs.observation_space, envs.action_space
        self._observations, self._actions = ObservationSpace(observation), ActionSpace(action)
        spec = spec_of(observation, action, env_id)
        self.spec = with_mask(spec, ArraySpec((spec.policy_size,), "int8"))
        self._has_row = np.zeros((games, players), np.bool_)  # the player has had a row in this game
        self._owed = np.zeros((games, players), np.float32)  # rewards since that row
        envs.async_reset()

    def recv(self) -> Rows:
        observation, reward, terminated, truncated, info = self._envs.recv()
        players = self._owed.shape[1]
        order = np.argsort(info["env_id"])
        game, terminated, truncated = (column[order] for column in (info["env_id"], terminated, truncated))
        is_over = terminated | truncated
        self._owed[game] += reward.reshape(-1, players)[order]
        has_row = self._has_row[game]
        is_turn = info[TURN][order, None] == np.arange(players)
        at, player = np.nonzero(np.where(is_over[:, None], has_row, is_turn))
        games, begins = game[at], ~has_row[at, player]
        flags = np.where(begins, RESET, 0).astype(np.uint8)
        flags[terminated[at]] |= TERMINATED
        flags[(truncated & ~terminated)[at]] |= TRUNCATED
        owed = np.where(begins, np.float32(0), self._owed[games, player])
        self._note(games, player, game[is_over])
        received = self._observations.rows(observation, len(reward))
        rows = tree_map(lambda leaf: leaf[order[at] * players + player], received)
        mask = np.where(is_over[:, None], True, info[LEGAL][order]).astype(np.int8)
        return Rows((games * players + player).astype(np.int32), beside_mask(rows, mask[at]), owed, flags)

    def _note(self, games: NDArray[Any], player: NDArray[Any], over: NDArray[Any]) -> None:
        """Note the rows that are about to be sent; games that are over begin again with their next step."""
        self._owed[games, player] = 0
        self._has_row[games, player] = True
        self._owed[over] = 0
        self._has_row[over] = False

    def send(self, action: Arrays, env_id: NDArray[np.int32]) -> None:
        """Send each game the action of its first row: it is the only one, or the game is over and ignores it."""
        games, first = np.unique(env_id // self._owed.shape[1], return_index=True)
        self._envs.send(self._actions.nested(tree_map(lambda leaf: leaf[first], action)), games)

    def render(self) -> NDArray[Any] | None:
        """Return a picture of the first game, if it was made with render_mode=rgb_array; only between steps."""
        frames = self._envs.render(env_ids=[0]) if self._envs.render_mode else None
        return None if frames is None else np.asarray(frames[0])

    def close(self) -> None:
        self._envs.close()
