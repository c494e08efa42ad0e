"""Simulations with several players as rows: whose turn it is, rewards, ends and masks of each player."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import envpool
import gymnasium
import numpy as np
import pettingzoo
import pytest

from envs_server import pool as pool_module
from envs_server.board_games import BoardGamePool
from envs_server.examination import check_env
from envs_server.pool import Pool
from envs_server.watchdog import Watchdog
from seedrl.config import ActorsConfig, EnvConfig, LearnerConfig
from seedrl.errors import ConfigError, EnvFailed, InvalidMessage
from seedrl.rows import ENDED, RESET, TERMINATED, Rows
from seedrl.serving.lease import Lease
from seedrl.sizes import evaluation_envs
from seedrl.specs import MASK
from seedrl.validation import check
from seedrl.wire import codec
from seedrl.wire.messages import Welcome
from tests.fakes import make_job
from tests.games import PAYOFF, Countdown, Duel

LINES = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]]
BOTH = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])


def make_pool(make_env: Any = None, num_envs: int = 4, players: int = 2, **fields: Any) -> Pool:
    fields.setdefault("env_id", "own" if make_env else "tests.games:Countdown")
    return pool_module.make_pool(make_job(num_envs, players=players, **fields), threads=2, make_env=make_env)


def play(pool: Pool, requests: int, choose: Callable[[Rows], Any], is_last: bool = True) -> list[tuple[Rows, Any]]:
    """Return the rows of N requests with the actions that they got, and close the pool if these are the last."""
    history = []
    try:
        for _ in range(requests):
            rows = pool.recv()
            history.append((rows, choose(rows)))
            pool.send(np.asarray(history[-1][1], np.int32), rows.env_id)
    finally:
        if is_last:
            pool.close()
    return history


def legal(seed: int = 0) -> Callable[[Rows], list[int]]:
    random = np.random.default_rng(seed)
    return lambda rows: [int(random.choice(np.flatnonzero(mask))) for mask in rows.observation[MASK]]


# envpool's board games, against rules written here.


class TicTacToe:
    """The state of one game, by the rules."""

    def __init__(self) -> None:
        self.board = [-1] * 9
        self.rows_of = [0, 0]
        self.turn: int | None = None  # the one who begins is drawn
        self.has_ended = False

    @property
    def scores(self) -> tuple[int, int] | None:
        """The rewards of both players; None while the game is not over."""
        for line in LINES:
            owner = {self.board[square] for square in line}
            if len(owner) == 1 and owner != {-1}:
                return (1, -1) if owner == {0} else (-1, 1)
        return (0, 0) if -1 not in self.board else None

    def seen_by(self, player: int) -> list[int]:
        return [[int(owner == player), int(owner == 1 - player)] for owner in self.board]


@pytest.mark.parametrize("group_size", [8, 4], ids=["together", "in groups"])
def test_board_game_rows_follow_the_rules_of_tic_tac_toe(group_size: int) -> None:
    games = [TicTacToe() for _ in range(4)]
    wins = draws = 0
    begun_by: set[int] = set()
    pool = make_pool(env_id="TicTacToe-v1", num_envs=8, group_size=group_size)
    for rows, actions in play(pool, 200, legal()):
        assert len(rows.env_id) >= group_size // 2
        for at, env in enumerate(rows.env_id.tolist()):
            number, player = divmod(env, 2)
            if games[number].has_ended and (rows.flags[at] & RESET):
                games[number] = TicTacToe()
            game = games[number]
            scores = game.scores
            flags = (0 if game.rows_of[player] else RESET) | (TERMINATED if scores else 0)
            assert rows.flags[at] == flags
            assert rows.reward[at] == (scores[player] if scores else 0)
            assert rows.observation["observation"][at].reshape(9, 2).astype(int).tolist() == game.seen_by(player)
            game.rows_of[player] += 1
            if scores:
                game.has_ended = True
                wins, draws = wins + (scores[player] == 1), draws + (scores == (0, 0))
                continue
            assert game.turn in (None, player)
            assert rows.observation[MASK][at].tolist() == [square == -1 for square in game.board]
            game.board[actions[at]], game.turn = player, 1 - player
            begun_by.update([player] if sum(square != -1 for square in game.board) == 1 else [])
    assert wins > 10
    assert draws >= 2
    assert begun_by == {0, 1}


class Racing:
    """envpool's games in another order in every step, as threads that race return them."""

    def __init__(self, envs: Any) -> None:
        self._envs = envs
        self._random = np.random.default_rng(0)
        self.observation_space, self.action_space = envs.observation_space, envs.action_space
        self.async_reset, self.send, self.close = envs.async_reset, envs.send, envs.close

    def recv(self) -> tuple[Any, ...]:
        observation, reward, terminated, truncated, info = self._envs.recv()
        order = self._random.permutation(len(terminated))
        by_player = (order[:, None] * 2 + np.arange(2)).ravel()
        info = {name: column[order] for name, column in info.items() if name != "players"}
        return observation[by_player], reward[by_player], terminated[order], truncated[order], info


def test_board_game_rows_are_in_the_order_of_games_however_envpool_returns_them() -> None:
    def played(race: Callable[[Any], Any]) -> list[tuple[Rows, Any]]:
        envs = envpool.make("TicTacToe-v1", env_type="gymnasium", num_envs=8, batch_size=8, seed=3, num_threads=1)
        return play(BoardGamePool(race(envs), "TicTacToe-v1", 8, 2), 60, legal())

    raced, alone = played(Racing), played(lambda envs: envs)
    for (rows, actions), (expected, expected_actions) in zip(raced, alone, strict=True):
        assert (np.diff(rows.env_id) > 0).all()
        assert actions == expected_actions
        assert rows.reward.tolist() == expected.reward.tolist()
        assert rows.flags.tolist() == expected.flags.tolist()
        for name in (MASK, "observation"):
            assert rows.observation[name].tolist() == expected.observation[name].tolist()


def test_board_game_with_other_players_than_the_settings_is_refused_with_the_number() -> None:
    with pytest.raises(ConfigError, match=r"TicTacToe-v1 has 2 players, not 1; set env.players=2"):
        make_pool(env_id="TicTacToe-v1", players=1)
    with pytest.raises(ConfigError, match=r"CartPole-v1 has 1 players, not 2; set env.players=1"):
        make_pool(env_id="CartPole-v1")


def test_players_of_envpool_who_move_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="who move at once"):
        make_pool(env_id="IntersectionMultiAgent-v0")


# Simulators of one's own.


@BOTH
def test_players_who_move_at_once_all_have_rows(processes: bool) -> None:
    random = np.random.default_rng(0)
    pool = make_pool(env_id="tests.games:Duel", processes=processes)
    history = play(pool, 7, lambda rows: random.integers(0, 3, len(rows.env_id)))
    assert [rows.flags.tolist() for rows, _ in history[:4]] == [[RESET] * 4, [0] * 4, [TERMINATED] * 4, [RESET] * 4]
    for (rows, actions), (following, _) in pairwise(history):
        assert following.env_id.tolist() == [0, 1, 2, 3]
        if rows.flags[0] & ENDED:
            assert following.reward.tolist() == [0] * 4
            continue
        own, other = np.array(actions), np.array(actions)[[1, 0, 3, 2]]
        assert following.reward.tolist() == PAYOFF[own, other].tolist()
        assert following.observation.tolist() == np.stack([own, other], axis=1).tolist()


def test_player_gets_what_others_cause_between_its_turns_and_a_last_row() -> None:
    """Three players, five stones: 0 takes 2, 1 takes 1, 2 takes 1, 0 takes the last."""
    moves = iter([[1], [0], [0], [0], [0, 0, 0], [0]])
    history = play(make_pool(lambda: Countdown(players=3), 3, 3), 6, lambda rows: next(moves))
    assert [rows.env_id.tolist() for rows, _ in history] == [[0], [1], [2], [0], [0, 1, 2], [0]]
    assert [rows.flags.tolist() for rows, _ in history] == [[RESET]] * 3 + [[0], [TERMINATED] * 3, [RESET]]
    # What players 1 and 2 lost before their first row is left out.
    assert [rows.reward.tolist() for rows, _ in history] == [[0], [0], [0], [0.25], [1, -1, -1], [0]]
    assert [rows.observation["observation"].ravel().tolist() for rows, _ in history] == [
        *([5], [3], [2], [1], [0, 0, 0], [5])
    ]
    assert [rows.observation[MASK].tolist() for rows, _ in history[2:5]] == [[[1, 1]], [[1, 0]], [[1, 1]] * 3]


@BOTH
def test_players_in_turn_have_whole_episodes_in_every_group(processes: bool) -> None:
    pool = make_pool(num_envs=12, group_size=6, processes=processes, options={"ending": "truncated"})
    returns: dict[int, list[float]] = {env: [] for env in range(12)}
    choose = legal()
    while min(map(len, returns.values())) < 5:  # one group may be faster than the other
        ((rows, _),) = play(pool, 1, choose, is_last=False)
        for env, reward, flags in zip(rows.env_id.tolist(), rows.reward.tolist(), rows.flags.tolist(), strict=True):
            if flags & RESET:
                returns[env].append(0.0)
            returns[env][-1] += reward
            assert not flags & TERMINATED
    pool.close()
    assert all(round(abs(value) * 4) in range(10) for values in returns.values() for value in values)


def test_player_without_a_row_in_a_game_has_none_at_its_end() -> None:
    pool = make_pool(lambda: Countdown(stones=2, players=3), 3, 3)
    history = play(pool, 4, lambda rows: [1] * len(rows.env_id) if rows.flags[0] == RESET else [0] * len(rows.env_id))
    assert [rows.env_id.tolist() for rows, _ in history] == [[0], [0], [0], [0]]
    assert [rows.flags.tolist() for rows, _ in history] == [[RESET], [TERMINATED]] * 2
    assert history[1][0].reward.tolist() == [1.25]


@pytest.mark.parametrize(
    ("trouble", "words"),
    [("names", "rewards must be a dict by player number, 0 to 1"), ("nothing", "the player that acts next")],
)
def test_simulator_that_breaks_the_interface_is_named_with_its_line(trouble: str, words: str) -> None:
    with pytest.raises(EnvFailed, match=rf"games.py:\d+.*{words}"):
        play(make_pool(lambda: Countdown(trouble=trouble)), 3, legal())


def test_simulator_with_other_players_than_the_settings_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Countdown has 3 players, and env.players=2"):
        make_pool(lambda: Countdown(players=3))
    with pytest.raises(ConfigError, match=r"Duel has 2 players; set env.players=2"):
        make_pool(Duel, players=1)


# PettingZoo's interfaces.


class ParallelPennies(pettingzoo.ParallelEnv):
    """Two players show a side each; "odd" leaves after one round, "even" plays on alone for another."""

    def __init__(self) -> None:
        self.possible_agents = ["even", "odd"]

    def observation_space(self, agent: str) -> gymnasium.spaces.Space:
        return gymnasium.spaces.Box(0, 9, (1,), np.float32)

    def action_space(self, agent: str) -> gymnasium.spaces.Space:
        return gymnasium.spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.agents, self._round = list(self.possible_agents), 0
        return {name: np.zeros(1, np.float32) for name in self.agents}, {name: {} for name in self.agents}

    def step(self, actions: dict[str, int]) -> tuple[Any, ...]:
        self._round += 1
        names = self.agents
        seen = {name: np.full(1, self._round, np.float32) for name in names}
        rewards = {name: float(actions[name]) + 1 for name in names}
        over = {name: self._round == 2 or name == "odd" for name in names}
        self.agents = [name for name in names if not over[name]]
        return seen, rewards, over, dict.fromkeys(names, False), {name: {} for name in names}


class Turns(pettingzoo.AECEnv):
    """Countdown as an AEC environment: the same game, the other interface."""

    def __init__(self) -> None:
        super().__init__()
        self._game = Countdown()
        self.possible_agents = ["first", "second"]

    def observation_space(self, agent: str) -> gymnasium.spaces.Space:
        return gymnasium.spaces.Box(0, 9, (1,), np.float32)

    def action_space(self, agent: str) -> gymnasium.spaces.Space:
        return gymnasium.spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = list(self.possible_agents)
        self._seen, infos = self._game.reset(seed)
        self.agent_selection = "first"
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {name: infos.get(number, {}) for number, name in enumerate(self.agents)}

    def observe(self, agent: str) -> Any:
        return self._seen[self.possible_agents.index(agent)]

    def step(self, action: Any) -> None:
        if self.terminations[self.agent_selection]:
            self._was_dead_step(action)
            return
        player = self.possible_agents.index(self.agent_selection)
        self._seen, rewards, is_over, _, infos = self._game.step({player: action})
        self.rewards = {name: rewards[number] for number, name in enumerate(self.possible_agents)}
        self.terminations = dict.fromkeys(self.agents, is_over)
        self.infos = {name: infos.get(number, {}) for number, name in enumerate(self.possible_agents)}
        self.agent_selection = self.possible_agents[1 - player]


def test_parallel_environment_of_pettingzoo_has_rows_until_each_player_ends() -> None:
    history = play(make_pool(ParallelPennies, 2), 5, lambda rows: [1, 0][: len(rows.env_id)])
    assert [rows.env_id.tolist() for rows, _ in history] == [[0, 1], [0, 1], [0], [0, 1], [0, 1]]
    assert [rows.flags.tolist() for rows, _ in history[:4]] == [[RESET] * 2, [0, TERMINATED], [TERMINATED], [RESET] * 2]
    assert [rows.reward.tolist() for rows, _ in history[:4]] == [[0, 0], [2, 1], [2], [0, 0]]
    assert [rows.observation.ravel().tolist() for rows, _ in history[:3]] == [[0, 0], [1, 1], [2]]


def test_aec_environment_of_pettingzoo_has_the_rows_of_the_same_game() -> None:
    own = play(make_pool(Countdown), 60, legal(3))
    zoo = play(make_pool(Turns), 60, legal(3))
    for (rows, _), (same, _) in zip(own, zoo, strict=True):
        assert rows.env_id.tolist() == same.env_id.tolist()
        assert (rows.flags.tolist(), rows.reward.tolist()) == (same.flags.tolist(), same.reward.tolist())
        assert rows.observation["observation"].tolist() == same.observation["observation"].tolist()
        assert rows.observation[MASK].tolist() == same.observation[MASK].tolist()


# Both ends of the stream.


def test_actor_owes_nothing_while_every_simulation_waits_for_an_action() -> None:
    lease = Lease(np.arange(4), np.full(4, RESET, np.uint8), players=2)
    nothing = np.zeros(2, np.float32)
    assert not lease.is_all_in_flight
    first = Rows(np.array([0, 3], np.int32), nothing, nothing, np.full(2, RESET, np.uint8))
    lease.admit(first)
    assert lease.is_all_in_flight
    lease.answered(first)
    lease.admit(Rows(np.array([1], np.int32), nothing[:1], nothing[:1], np.full(1, RESET, np.uint8)))
    assert not lease.is_all_in_flight


def test_watchdog_waits_for_simulations_not_for_players() -> None:
    watchdog = Watchdog(10.0, 10.0, has_requests=lambda: False, cancel=lambda: None)
    watchdog.welcomed(4, players=2)
    watchdog.built()
    watchdog.received(np.array([0, 3], np.int32))
    watchdog._looks += 100
    assert watchdog._hanging() is None
    watchdog.sent(np.array([3], np.int32))
    watchdog._looks += 100
    assert "environment 1 " in str(watchdog._hanging())


def test_welcome_says_the_players() -> None:
    job = Welcome(1, "TicTacToe-v1", {}, 8, 4, 1, players=2)
    assert codec.parse_response(codec.serialize_response(job)) == job._replace(wrappers=())
    with pytest.raises(InvalidMessage, match=r"env.players: expected a divisor of group_size=4, saw 3"):
        codec.parse_response(codec.serialize_response(job._replace(players=3)))


def test_settings_keep_the_players_of_a_simulation_together() -> None:
    config = LearnerConfig(env=EnvConfig(id="x", players=2), actors=ActorsConfig(envs=12, groups=2, evaluation=0.3))
    check(config)
    assert evaluation_envs(config) == [0, 1, 6, 7]
    config.env.players = 4
    with pytest.raises(ConfigError, match=r"env.players=4 must divide actors.envs=12 / actors.groups=2"):
        check(config)


def test_documented_game_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "docs/self-play.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_game.py").write_text(program)
    monkeypatch.syspath_prepend(str(tmp_path))
    history = play(make_pool(env_id="my_game:Nim"), 40, legal())
    assert {flags for rows, _ in history for flags in rows.flags.tolist()} == {0, RESET, TERMINATED}


def test_simulators_are_examined_before_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    found = check_env(Countdown, steps=200)
    assert {finding.about for finding in found} >= {"spaces", "rows", "seeding", "ends", "rewards", "speed"}
    assert not [finding for finding in found if finding.level == "error"]
