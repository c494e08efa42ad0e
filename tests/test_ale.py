"""The pool of ale-py's vector environments, against single games that are stepped one after the other."""

from typing import Any

import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv

from envs_server.ale import AlePool
from envs_server.pool import make_pool
from seedrl.errors import ConfigError
from seedrl.rows import ENDED, LIFE, RESET, TERMINATED, TRUNCATED
from seedrl.specs import ArraySpec, EnvSpec, discrete
from tests.fakes import make_job

LIMIT = {"max_num_frames_per_episode": 100, "noop_max": 30}
LIVES = {"episodic_life": True, "noop_max": 5}


class SingleGame:
    """One game with what the pool should have: a seed, an autoreset on the next step, no stack and no clipping."""

    def __init__(self, game: str, seed: int, **options: Any) -> None:
        self.env = AtariVectorEnv(game, 1, num_threads=1, stack_num=1, reward_clipping=False, **options)
        self.observation = self.env.reset(seed=np.array([seed]))[0][0]
        self.flags, self.reward = RESET, 0.0

    def step(self, action: int) -> None:
        before = self.flags
        observation, reward, terminated, truncated, info = self.env.step(np.array([action], np.int32))
        self.observation = observation[0]
        end = TERMINATED if terminated[0] else TRUNCATED if truncated[0] else 0
        life = LIFE if terminated[0] and info["lives"][0] else 0
        self.flags = RESET | before & LIFE if before & ENDED else end | life
        self.reward = 0.0 if before & ENDED else float(reward[0])


@pytest.mark.parametrize(
    ("game", "options", "end"), [("pong", LIMIT, TRUNCATED), ("breakout", LIVES, TERMINATED | LIFE)]
)
def test_rows_equal_those_of_single_games(game: str, options: dict[str, Any], end: int) -> None:
    job = make_job(4, 2, env_id=f"ale:{game}", options=options)
    pool = AlePool(job, threads=2)
    seeds = (np.random.SeedSequence(job.seed).generate_state(4) >> 2).tolist()
    games = [SingleGame(game, seed, **options) for seed in seeds]
    generator = np.random.default_rng(0)
    choices, seen = pool.spec.policy_size, 0
    for _ in range(2 * 50):
        rows = pool.recv()
        expected = [games[number] for number in rows.env_id]
        assert rows.flags.tolist() == [each.flags for each in expected]
        assert rows.reward.tolist() == [each.reward for each in expected]
        np.testing.assert_array_equal(rows.observation, np.stack([each.observation for each in expected]))
        seen |= int(np.bitwise_or.reduce(rows.flags))
        action = generator.integers(0, choices, 2).astype(np.int32)
        pool.send(action, rows.env_id)
        for each, chosen in zip(expected, action.tolist(), strict=True):
            each.step(chosen)
    pool.close()
    assert seen == RESET | end


def test_pool_is_chosen_by_its_id_and_has_the_newest_frame_only() -> None:
    pool = make_pool(make_job(2, env_id="ale:pong"), threads=1)
    assert isinstance(pool, AlePool)
    assert pool.spec == EnvSpec(ArraySpec((1, 84, 84), "uint8"), discrete(6))
    pool.recv()
    pool.close()


@pytest.mark.parametrize(
    ("env_id", "options", "words"),
    [
        ("ale:Pong", {}, "ale:Pong: ale-py has no such game; it has .* pong"),
        ("ale:pong", {"frame_skip": 4}, "ale-py cannot make pong with .*frame_skip"),
    ],
)
def test_unknown_game_and_option_are_refused_by_name(env_id: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AlePool(make_job(2, env_id=env_id, options=options), threads=1)
