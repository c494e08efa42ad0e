"""Plays episodes of one environment with a trained policy. Knows nothing of how they are recorded or shown."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

from numpy.typing import NDArray

from envs_server.pool import Pool, make_pool
from seedrl.config import EnvConfig
from seedrl.errors import ConfigError, require
from seedrl.rows import LIFE, RESET, Rows, ends_game
from seedrl.specs import Arrays, rows_of
from seedrl.trained.load import Trained
from seedrl.wire.messages import Welcome


class Moment(NamedTuple):
    """One step of an episode, as it is before the next action."""

    episode: int
    step: int  # 0 is the first observation
    reward: float  # received on arriving here
    is_last: bool
    is_cut: bool  # it is the last one because of the limit of steps, and not because the episode ended
    observation: Arrays  # [1, ...]  the newest frame
    frame: NDArray[Any] | None  # what the environment renders; None if it does not render


def job_of(env: EnvConfig, seed: int) -> Welcome:
    """Describe a pool of one environment with these settings. Raises ConfigError if it has several players."""
    require(env.players == 1, f"only environments with one player can be recorded, and env.players={env.players}")
    return Welcome(0, env.id, env.options, 1, 1, seed, env.processes, env.wrappers)


def play(trained: Trained, job: Welcome, episodes: int, max_steps: int) -> Iterator[Moment]:
    """Yield every moment of some episodes. After an episode that is cut at `max_steps` the pool is made again."""
    begun = 0
    while begun < episodes:
        with closing(make_pool(job._replace(seed=job.seed + begun), threads=1)) as pool:
            if pool.spec != trained.spec:
                raise ConfigError(f"{job.env_id} has {pool.spec} here, but the policy was trained on {trained.spec}")
            for moment in _moments(trained, pool, begun, max_steps):
                yield moment
                begun = moment.episode + 1
                if moment.is_last and begun == episodes:
                    return


def _moments(trained: Trained, pool: Pool, episode: int, max_steps: int) -> Iterator[Moment]:
    """Yield moments, beginning with the first of this episode, until an episode is cut."""
    player = trained.player(rows=1)
    step = 0
    while step < max_steps:
        rows = pool.recv()
        begins, ends = (rows.flags & RESET) != 0, bool(ends_game(rows.flags)[0])
        step = 0 if begins[0] and not rows.flags[0] & LIFE else step + 1
        yield _moment(episode, step, rows, ends, not ends and step == max_steps, pool)
        pool.send(player.act(rows.observation, rows.reward, begins), rows.env_id)
        if ends:
            episode, step = episode + 1, 0


def _moment(episode: int, step: int, rows: Rows, ends: bool, is_cut: bool, pool: Pool) -> Moment:
    frame = pool.render() if hasattr(pool, "render") else None
    observation = rows_of(rows.observation, 0, 1)
    return Moment(episode, step, float(rows.reward[0]), ends or is_cut, is_cut, observation, frame)
