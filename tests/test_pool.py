"""The pool against the real envpool: the same rows, with ends and resets where they belong (invariant 7)."""

import os
import signal
import subprocess
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import envpool
import gymnasium
import numpy as np
import pytest

from envs_server import pool as pool_module
from envs_server.doom import PREFIX, remove_abandoned, running_in
from envs_server.pool import EnvPool, Pool
from seedrl.errors import ConfigError
from seedrl.rows import ENDED, RESET, TERMINATED, TRUNCATED, Rows
from seedrl.wire.messages import Welcome
from tests.fakes import FakePool, make_job, make_spec
from tests.integration.waiting import eventually

ENVS = 4


def make_pool(env_id: str = "CartPole-v1", num_envs: int = ENVS, group_size: int | None = None, **fields: Any) -> Pool:
    return pool_module.make_pool(make_job(num_envs, group_size, env_id=env_id, **fields), threads=1)


def make_envpool(job: Welcome) -> Any:
    """Return the same environments as envpool makes them itself."""
    envs = envpool.make(
        job.env_id, env_type="gymnasium", num_envs=job.num_envs, seed=job.seed, num_threads=1, **job.options
    )
    envs.async_reset()
    return envs


def play(pool: Pool, steps: int, action: int = 0) -> list[Rows]:
    history = []
    for _ in range(steps):
        history.append(pool.recv())
        pool.send(np.full(len(history[-1].env_id), action, np.int32), history[-1].env_id)
    return history


@pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
@pytest.mark.parametrize(
    ("env_id", "options"),
    [("CartPole-v1", {}), ("CartPole-v1", {"max_episode_steps": 6}), ("Catch-v0", {})],
    ids=["terminating", "truncating", "catch"],
)
def test_recv_rows_equal_envpools_own(env_id: str, options: dict[str, Any]) -> None:
    job = make_job(ENVS, env_id=env_id, options=options)
    pool, envs = EnvPool(job, threads=1), make_envpool(job)
    generator = np.random.default_rng(0)
    ends = 0
    for _ in range(60):
        rows = pool.recv()
        observation, reward, terminated, truncated, info = envs.recv()
        np.testing.assert_array_equal(rows.env_id, info["env_id"])
        np.testing.assert_array_equal(rows.observation, observation)
        np.testing.assert_array_equal(rows.reward, reward)
        np.testing.assert_array_equal((rows.flags & TERMINATED) != 0, terminated)
        np.testing.assert_array_equal((rows.flags & TRUNCATED) != 0, truncated)
        np.testing.assert_array_equal((rows.flags & RESET) != 0, info["elapsed_step"] == 0)
        ends += np.count_nonzero(rows.flags & ENDED)
        action = generator.integers(0, pool.spec.policy_size, ENVS).astype(np.int32)
        pool.send(action, rows.env_id)
        envs.send(action, info["env_id"])
    assert ends >= 8


@pytest.mark.parametrize("env_id", ["CartPole-v1", "BallInCupCatch-v1"])
def test_recv_first_row_has_no_reward(env_id: str) -> None:
    """envpool gives a reward there for some of DeepMind Control."""
    pool = make_pool(env_id)
    rows = pool.recv()
    assert rows.flags.tolist() == [RESET] * ENVS
    assert rows.reward.tolist() == [0.0] * ENVS
    assert rows.reward.dtype == np.float32
    pool.close()


def test_recv_row_after_end_is_reset_without_reward() -> None:
    history = play(make_pool(), steps=40)
    flags = np.stack([rows.flags for rows in history])
    reward = np.stack([rows.reward for rows in history])
    assert (flags[0] == RESET).all()
    np.testing.assert_array_equal((flags[1:] & RESET) != 0, (flags[:-1] & ENDED) != 0)
    assert (reward[(flags & RESET) != 0] == 0).all()
    assert np.count_nonzero(flags & TERMINATED) >= ENVS


def test_recv_terminated_row_shows_the_true_final_observation() -> None:
    history = play(make_pool(), steps=40)
    final = np.concatenate([rows.observation[(rows.flags & TERMINATED) != 0] for rows in history])
    others = np.concatenate([rows.observation[(rows.flags & TERMINATED) == 0] for rows in history])
    limit = 12 * np.pi / 180  # CartPole ends when the pole leans more than this
    assert (np.abs(final[:, 2]) > limit).all()
    assert (np.abs(others[:, 2]) <= limit).all()


def test_recv_time_limit_truncates_on_its_last_step() -> None:
    history = play(make_pool(options={"max_episode_steps": 5}), steps=13)
    flags = [int(rows.flags[0]) for rows in history]
    assert flags == [RESET, 0, 0, 0, 0, TRUNCATED, RESET, 0, 0, 0, 0, TRUNCATED, RESET]


def test_recv_catch_terminates_after_nine_steps_with_a_reward() -> None:
    history = play(make_pool("Catch-v0"), steps=10)
    assert [int(rows.flags[0]) for rows in history] == [RESET, *[0] * 8, TERMINATED]
    assert set(np.abs(history[-1].reward)) == {1.0}
    assert not any(rows.reward.any() for rows in history[:-1])


def test_recv_terminated_and_truncated_at_once_is_terminated(monkeypatch: pytest.MonkeyPatch) -> None:
    both = np.array([True, True, False])
    envs = SimpleNamespace(
        observation_space=gymnasium.spaces.Box(-1, 1, (2,)),
        action_space=gymnasium.spaces.Discrete(3),
        async_reset=lambda: None,
        recv=lambda: (
            np.zeros((3, 2), np.float32),
            np.zeros(3),
            both,
            np.array([True, False, True]),
            {"env_id": np.arange(3, dtype=np.int32)},
        ),
    )
    monkeypatch.setattr(pool_module, "_make", lambda job, threads: envs)
    rows = make_pool(num_envs=3).recv()
    assert (rows.flags & ENDED).tolist() == [TERMINATED, TERMINATED, TRUNCATED]
    assert rows.reward.dtype == np.float32


def test_recv_groups_have_their_size_and_visit_every_environment() -> None:
    pool = make_pool(num_envs=6, group_size=2)
    expects_reset = np.ones(6, np.bool_)
    visits = np.zeros(6, np.int64)
    for rows in play(pool, steps=90):
        assert len(set(rows.env_id.tolist())) == len(rows.env_id) == len(rows.observation) == 2
        np.testing.assert_array_equal((rows.flags & RESET) != 0, expects_reset[rows.env_id])
        expects_reset[rows.env_id] = (rows.flags & ENDED) != 0
        visits[rows.env_id] += 1
    assert visits.min() > 0


def test_recv_whole_pool_comes_in_order_of_environments() -> None:
    for rows in play(make_pool(), steps=20):
        assert rows.env_id.tolist() == list(range(ENVS))


POSITIONS = "envs_server.wrappers:CartPolePositions"


def test_recv_cartpole_positions_have_no_velocities() -> None:
    whole, positions = make_pool(), make_pool(wrappers=[POSITIONS])
    assert positions.spec == make_spec(shape=(2,), num_actions=2)
    for all_rows, rows in zip(play(whole, steps=30), play(positions, steps=30), strict=True):
        np.testing.assert_array_equal(rows.observation, all_rows.observation[:, [0, 2]])
        assert rows.observation.flags.c_contiguous


def test_recv_same_seed_repeats_and_another_differs() -> None:
    first, again, other = (np.stack([rows.observation for rows in play(make_pool(seed=s), 15)]) for s in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("env_id", "options", "spec"),
    [
        ("CartPole-v1", {}, make_spec((4,), "float32", 2)),
        ("Catch-v0", {}, make_spec((10, 5), "float32", 3)),
        ("Pong-v5", {"stack_num": 1}, make_spec((1, 84, 84), "uint8", 6)),
    ],
)
def test_spec_real_environment_is_as_announced_and_as_received(env_id: str, options: dict[str, Any], spec: Any) -> None:
    pool = make_pool(env_id, num_envs=1, options=options)
    assert pool.spec == spec
    rows = pool.recv()
    assert rows.observation.shape == (1, *spec.observation.shape)
    assert rows.observation.dtype == spec.observation.dtype
    assert (rows.env_id.dtype, rows.reward.dtype, rows.flags.dtype) == (np.int32, np.float32, np.uint8)


def test_make_warns_nothing() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_pool("CartPole-v1")
    assert caught == []


def test_make_unknown_id_suggests_near_matches() -> None:
    with pytest.raises(
        ConfigError, match=r"^env\.id='CartPol-v1' is not an envpool environment; did you mean CartPole-v1"
    ):
        make_pool("CartPol-v1")


def test_make_unknown_id_with_nothing_near_suggests_nothing() -> None:
    with pytest.raises(ConfigError, match=r"^env\.id='§§§' is not an envpool environment; others"):
        make_pool("§§§")


def test_make_cartpole_positions_of_another_environment_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^CartPolePositions needs the four numbers of CartPole, saw "):
        make_pool("Catch-v0", wrappers=[POSITIONS])


def test_make_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^envpool cannot make CartPole-v1 with .*'wings': 2.*"):
        make_pool(options={"wings": 2})


def test_fake_pool_behaves_like_the_real_one() -> None:
    """What the other tests rely on: a fake episode has the flags and rewards of Catch, but for their values."""
    fake = FakePool(make_job(ENVS), episode_length=9)
    for real in play(make_pool("Catch-v0"), steps=25):
        rows = fake.recv()
        fake.send(np.zeros(ENVS, np.int32), rows.env_id)
        np.testing.assert_array_equal(rows.flags, real.flags)
        np.testing.assert_array_equal(rows.env_id, real.env_id)
        assert [array.dtype for array in rows] == [array.dtype for array in real]


def test_vizdoom_leaves_nothing_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engine writes _vizdoom.ini and _vizdoom/ into the directory it is started in."""
    engines, here = tmp_path / "engines", tmp_path / "here"
    engines.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr("tempfile.tempdir", str(engines))
    pool = pool_module.make_pool(make_job(1, env_id="HealthGathering-v1"), threads=1)
    pool.recv()
    assert any(engines.glob("*/_vizdoom*")), "this is where its engines run"
    [directory] = engines.iterdir()
    assert list(running_in(str(directory)))
    pool.close()
    assert list(here.iterdir()) == []
    assert not any(engines.glob("*/vizdoom"))
    eventually(lambda: not list(running_in(str(directory))))


def test_vizdoom_engines_of_an_actor_that_was_killed_are_ended_by_the_next_one(tmp_path: Path) -> None:
    owner = subprocess.Popen(["true"])
    owner.wait()
    abandoned, other = tmp_path / f"{PREFIX}{owner.pid}-x", tmp_path / f"{PREFIX}{os.getpid()}-x"
    abandoned.mkdir()
    other.mkdir()
    engines = [subprocess.Popen(["sleep", "60"], cwd=path) for path in (abandoned, other)]
    try:
        remove_abandoned(tmp_path)
        assert engines[0].wait(timeout=10) == -signal.SIGKILL
        assert engines[1].poll() is None
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()
    assert list(tmp_path.iterdir()) == [other]
