"""Simulations with several players, some at a time, one after the other. Knows nothing of threads or processes.

All that is asked of one: `players`, `observation_space` and `action_space` of a single player, `reset(seed=…)` giving
(observations, infos), and `step(actions)` giving (observations, rewards, terminated, truncated, infos), all of them
dicts by player number. `observations` has the players that act next, and those whose episode ends; the next `actions`
are theirs. PettingZoo's two interfaces are made to look like this one in envs_server/pettingzoo.py.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from envs_server.first_rows import FIRST_STEPS
from envs_server.masks import beside_mask, mask_spec, with_mask
from envs_server.pettingzoo import adapted
from envs_server.spaces import ActionSpace, ObservationSpace, spec_of
from envs_server.stepping import (
    MakeEnv,
    Stepped,
    brief,
    expect_number,
    expect_step,
    find_env,
    made,
    players_of,
    reset,
    said_of,
)
from seedrl.errors import ConfigError, EnvFailed
from seedrl.rows import ENDED, RESET, TERMINATED, TRUNCATED
from seedrl.specs import MASK, Arrays, tree_map


class PlayerRow(NamedTuple):
    """The newest row of one player."""

    player: int
    observation: Any
    reward: float
    flags: int
    info: dict[str, Any]


class Game:
    """One simulation: its players, and what each of them is owed. Owned by one thread."""

    def __init__(self, env: Any, seed: int) -> None:
        self._env = env
        self._seed: int | None = seed
        self._left: set[int] = set()  # players whose episode has not ended
        self._had_row: set[int] = set()  # players with a row in this game
        self._owed: dict[int, float] = {}  # rewards since a player's newest row

    def next(self, actions: dict[int, Any]) -> list[PlayerRow]:
        """Step with the actions of the players that had a row and have not ended; begin again if all have."""
        if not self._left:
            return self._reset()
        acting = {player: action for player, action in actions.items() if player in self._left}
        observations, rewards, terminated, truncated, infos = expect_step(self._env, self._env.step(acting))
        for player, reward in self._by_player("rewards", rewards).items():
            self._owed[player] = self._owed.get(player, 0.0) + expect_number(self._env, reward)
        ended = self._flags("truncated", truncated, TRUNCATED) | self._flags("terminated", terminated, TERMINATED)
        return self._rows("step", observations, infos, ended)

    def _reset(self) -> list[PlayerRow]:
        self._left, self._had_row, self._owed = set(range(self._env.players)), set(), {}
        observations, infos = reset(self._env, self._seed)
        self._seed = None  # the seed of the first reset decides the later ones
        return self._rows("reset", observations, infos, {})

    def _rows(self, method: str, observations: Any, infos: Any, ended: dict[int, int]) -> list[PlayerRow]:
        found, infos = [], self._by_player("infos", infos)
        seen = self._by_player("observations", observations)
        for player in sorted(self._left & (seen.keys() | ended.keys())):
            is_first = player not in self._had_row
            if player in ended and is_first:  # it has never acted
                continue
            if player not in seen:
                raise self._failed(method, f"player {player} has ended, and observations have none for it")
            reward = 0.0 if is_first else self._owed.get(player, 0.0)
            flags = (RESET if is_first else 0) | ended.get(player, 0)
            found.append(PlayerRow(player, seen[player], reward, flags, infos.get(player, {})))
            self._had_row.add(player)
            self._owed[player] = 0.0
        self._left -= ended.keys()
        if not found:
            raise self._failed(method, "observations must have the player that acts next; it returned none that does")
        return found

    def _flags(self, name: str, value: Any, flag: int) -> dict[int, int]:
        """Return the flag by player that has ended; a plain bool is that of all players."""
        if isinstance(value, bool | np.bool_):
            value = dict.fromkeys(self._left, value)
        return {player: flag for player, has_ended in self._by_player(name, value).items() if has_ended}

    def _by_player(self, name: str, value: Any) -> dict[int, Any]:
        if not isinstance(value, dict) or not value.keys() <= set(range(self._env.players)):
            seen = f"the keys {list(value)[:8]}" if isinstance(value, dict) else brief(value)
            words = f"{name} must be a dict by player number, 0 to {self._env.players - 1}; it returned {seen}"
            raise self._failed("step", words)
        return value

    def _failed(self, method: str, words: str) -> EnvFailed:
        return EnvFailed(said_of(self._env, method, words))


class Games:
    """Owned by one thread. Player p of the simulation n has the number n * players + p."""

    def __init__(self, make_env: MakeEnv | str, options: dict[str, Any], seeds: Sequence[int], players: int) -> None:
        make = find_env(make_env) if isinstance(make_env, str) else make_env
        self._envs = [_expected(made(make, options), players) for _ in seeds]
        self._games = [Game(env, seed) for env, seed in zip(self._envs, seeds, strict=True)]
        self._players = players
        one = self._envs[0]
        self._observations, self._actions = ObservationSpace(one.observation_space), ActionSpace(one.action_space)
        spec = spec_of(one.observation_space, one.action_space, type(one).__name__)
        self._unchecked = FIRST_STEPS * len(seeds) * players  # rows whose observations are compared with the space
        self._sent = [game.next({}) for game in self._games]
        self._mask = mask_spec(self._sent[0][0].info, spec)
        self.spec = spec if self._mask is None else with_mask(spec, self._mask)

    def first(self) -> Stepped:
        """Return the rows that the simulations begin with."""
        return self._stepped()

    def step(self, action: Arrays) -> Stepped:
        """Step with the actions of the rows that were returned before, in their order."""
        at, sent = 0, []
        for game, rows in zip(self._games, self._sent, strict=True):
            sent.append(game.next({row.player: self._action(action, at + place) for place, row in enumerate(rows)}))
            at += len(rows)
        self._sent = sent
        return self._stepped()

    def _action(self, action: Arrays, row: int) -> Any:
        return self._actions.nested(tree_map(lambda leaf: leaf[row], action))

    def _stepped(self) -> Stepped:
        rows = [row for rows in self._sent for row in rows]
        numbers = [n * self._players + row.player for n, rows in enumerate(self._sent) for row in rows]
        self._expect_observations(rows)
        observation = self._observations.stacked([row.observation for row in rows])
        if self._mask is not None:
            anything = np.ones(self._mask.shape, np.int8)
            masks = [anything if row.flags & ENDED else row.info.get(MASK, anything) for row in rows]
            observation = beside_mask(observation, np.stack([np.asarray(mask, np.int8) for mask in masks]))
        return Stepped(
            np.array(numbers, np.int32),
            observation,
            np.array([row.reward for row in rows], np.float32),
            np.array([row.flags for row in rows], np.uint8),
        )

    def _expect_observations(self, rows: list[PlayerRow]) -> None:
        for row in rows if self._unchecked > 0 else ():
            self._unchecked -= 1
            for fault in self._observations.faults(row.observation):
                raise EnvFailed(said_of(self._envs[0], "step", f"player {row.player}: {fault}"))

    def render(self) -> Any:
        """Return a picture of the first simulation, if it was made with render_mode=rgb_array."""
        env = self._envs[0]
        frame = env.render() if getattr(env, "render_mode", None) == "rgb_array" else None
        return None if frame is None else np.asarray(frame)

    def close(self) -> None:
        for env in self._envs:
            if hasattr(env, "close"):
                env.close()


def _expected(env: Any, players: int) -> Any:
    """Return a simulation with the interface above. Raises ConfigError if it lacks something."""
    if players_of(env) != players:
        name, own = type(env).__name__, players_of(env)
        raise ConfigError(f"{name} has {own} players, and env.players={players}; set env.players={own} on the learner")
    env = adapted(env)
    for name in ("observation_space", "action_space", "reset", "step"):
        if not hasattr(env, name):
            raise ConfigError(f"{type(env).__name__} has no {name}, which a simulation needs")
    return env
