"""The pool of environments with Gymnasium's interface, in threads and in processes: rows, ends, seeds, failures."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from envs_server import shares
from envs_server.gym import GymPool
from envs_server.stepping import Envs, find_env
from seedrl.errors import ConfigError, EnvFailed
from seedrl.rows import ENDED, RESET, TERMINATED, TRUNCATED, Rows
from seedrl.specs import ArraySpec, EnvSpec, discrete, tree_map
from tests.fakes import make_job
from tests.integration.waiting import DEADLINE, eventually
from tests.simulators import Counter, released_at_the_end

BOTH = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])


def make_pool(
    make_env: Any = None,
    num_envs: int = 4,
    group_size: int | None = None,
    threads: int = 2,
    env_id: str = "tests.simulators:Counter",
    **fields: Any,
) -> GymPool:
    return GymPool(make_job(num_envs, group_size, env_id=env_id, **fields), threads, make_env)


def play(pool: GymPool, requests: int, action: int = 1) -> list[Rows]:
    """Return the rows of N requests and close the pool."""
    history = []
    try:
        for _ in range(requests):
            history.append(pool.recv())
            pool.send(np.full(len(history[-1].env_id), action, np.int32), history[-1].env_id)
    finally:
        pool.close()
    return history


def living() -> list[str]:
    """Processes of environments that are still there."""
    return [process.name for process in multiprocessing.active_children() if process.name.startswith(shares.PREFIX)]


# Rows.


@BOTH
@pytest.mark.parametrize(
    ("ending", "flag"),
    [("terminated", TERMINATED), ("truncated", TRUNCATED), ("terminated and truncated", TERMINATED)],
)
def test_row_after_an_end_is_a_reset_without_reward(processes: bool, ending: str, flag: int) -> None:
    history = play(make_pool(processes=processes, options={"length": 2, "ending": ending}), 7)
    assert [rows.flags.tolist() for rows in history[:4]] == [[RESET] * 4, [0] * 4, [flag] * 4, [RESET] * 4]
    assert [rows.reward[0] for rows in history] == [0, 1, 2, 0, 1, 2, 0]
    observed = [rows.observation[2, :2].tolist() for rows in history]
    assert observed == [[1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2], [3, 0]]
    for rows in history:
        assert (rows.env_id.dtype, rows.reward.dtype, rows.flags.dtype) == (np.int32, np.float32, np.uint8)
        assert (rows.observation.dtype, rows.observation.shape) == (np.float64, (4, 3))


def test_rows_equal_gymnasiums_own() -> None:
    job = make_job(3, env_id="gymnasium:CartPole-v1", options={"max_episode_steps": 8})
    pool = GymPool(job, threads=2)
    seeds = (np.random.SeedSequence(job.seed).generate_state(3) >> 1).tolist()
    envs = [gymnasium.make("CartPole-v1", max_episode_steps=8) for _ in seeds]
    expected = [env.reset(seed=seed)[0] for env, seed in zip(envs, seeds, strict=True)]
    flags = [RESET] * 3
    generator = np.random.default_rng(0)
    for _ in range(40):
        rows = pool.recv()
        np.testing.assert_array_equal(rows.observation, np.stack(expected))
        assert rows.flags.tolist() == flags
        action = generator.integers(0, 2, 3).astype(np.int32)
        pool.send(action, rows.env_id)
        for number, env in enumerate(envs):
            if flags[number] & ENDED:
                expected[number], flags[number] = env.reset()[0], RESET
            else:
                expected[number], _, terminated, truncated, _ = env.step(action[number])
                flags[number] = TERMINATED if terminated else TRUNCATED if truncated else 0
    pool.close()


def test_same_seed_repeats_whatever_the_threads_and_processes() -> None:
    def played(**fields: Any) -> Any:
        return np.stack([rows.observation for rows in play(make_pool(**fields), 9)])

    first = played(threads=1)
    assert len(set(first[0, :, 2])) == 4  # environments differ
    for other in (played(threads=3), played(processes=True)):
        np.testing.assert_array_equal(other, first)
    assert not np.array_equal(played(seed=8), first)


def test_seed_is_given_once() -> None:
    made: list[Counter] = []

    def make() -> Counter:
        made.append(Counter())
        return made[-1]

    play(make_pool(make, num_envs=1), 10)
    assert made[0].seeds[0] is not None
    assert len(made[0].seeds) > 2
    assert set(made[0].seeds[1:]) == {None}


def test_group_that_is_done_first_comes_first() -> None:
    numbers = iter(range(4))

    def make() -> Counter:
        slow = next(numbers) < 2
        return Counter(trouble="sleep" if slow else "", at=1)

    pool = make_pool(make, group_size=2, threads=1)
    history = play(pool, 6)
    assert [int(rows.env_id[0]) for rows in history].count(2) >= 4
    assert {tuple(rows.env_id.tolist()) for rows in history} <= {(0, 1), (2, 3)}  # the slow one may not come at all


def test_mask_in_info_becomes_part_of_the_observation() -> None:
    pool = make_pool(env_id="gymnasium:Taxi-v4", num_envs=2)
    mask, state = ArraySpec((6,), "int8"), ArraySpec((), "int64", 500)
    assert pool.spec == EnvSpec({"action_mask": mask, "observation": state}, discrete(6))
    env = gymnasium.make("Taxi-v4").unwrapped
    for rows in play(pool, 5):
        assert isinstance(rows.observation, dict)
        for row, allowed in zip(rows.observation["observation"], rows.observation["action_mask"], strict=True):
            np.testing.assert_array_equal(allowed, env.action_mask(int(row)))


class Nested(gymnasium.Env):
    """Any spaces; checks that actions are theirs, and masks some of the time."""

    observation_space = spaces.Dict({"eye": spaces.Tuple([spaces.Box(0, 1, (2,)), spaces.Discrete(5, start=2)])})
    action_space = spaces.Dict({"go": spaces.Discrete(3, start=-1), "arm": spaces.Box(-1, 1, (2,), np.float64)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {"action_mask": [1, 0, 1]}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), 1.0, False, False, {}


def test_nested_spaces_are_trees_with_the_mask_beside_them() -> None:
    pool = make_pool(Nested)
    assert list(pool.spec.observation) == ["action_mask", "eye/0", "eye/1"]
    for _ in range(5):
        rows = pool.recv()
        assert isinstance(rows.observation, dict)
        assert rows.observation["eye/1"].max() < 5
        pool.send(tree_map(lambda leaf: np.ones((4, *leaf.shape), leaf.dtype), pool.spec.action), rows.env_id)
    assert rows.observation["action_mask"].tolist() == [[1, 1, 1]] * 4  # info had none
    pool.close()


# Failures.


@BOTH
def test_environment_that_raises_is_named_with_its_line_and_its_traceback(processes: bool) -> None:
    with pytest.raises(EnvFailed) as raised:
        play(make_pool(processes=processes, options={"trouble": "raise", "length": 99}), 20)
    place = r"^tests/simulators\.py:\d+ in _have_trouble: the environment raised: ArithmeticError\('no such luck'\)$"
    assert re.search(place, str(raised.value))
    assert "in _have_trouble" in raised.value.traceback
    assert raised.value.traceback.endswith("ArithmeticError: no such luck")
    assert "in _have_trouble" in "".join(traceback.format_exception(raised.value))  # as a program shows it that ends
    assert living() == []


def test_process_that_dies_is_named() -> None:
    with pytest.raises(EnvFailed, match=r"^the process of environments 0 to 1 ended with code 9$"):
        play(make_pool(processes=True, num_envs=2, threads=1, options={"trouble": "exit"}), 20)
    assert living() == []


def test_process_that_is_killed_is_named() -> None:
    pool = make_pool(processes=True, num_envs=1)
    [process] = [each for each in multiprocessing.active_children() if each.name.startswith(shares.PREFIX)]
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EnvFailed, match=r"^the process of environments 0 to 0 ended with code -9$"):
        play(pool, 20)


@BOTH
def test_abandon_brings_back_a_thread_that_waits_for_a_hanging_environment(processes: bool) -> None:
    pool = make_pool(processes=processes, num_envs=1, options={"trouble": "hang", "length": 99})
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            play(pool, 20)
        except EnvFailed as error:
            errors.append(error)

    with released_at_the_end():
        waiting = threading.Thread(target=wait)
        waiting.start()
        eventually(lambda: not pool._answers.qsize() and not waiting.join(0.2))
        pool.abandon()
        waiting.join(DEADLINE)
        assert not waiting.is_alive()
    assert [str(error) for error in errors] == ["the environments were abandoned"]
    assert living() == []


@BOTH
def test_close_leaves_nothing_behind(processes: bool) -> None:
    closed, threads = Counter.closed, set(threading.enumerate())
    pool = make_pool(processes=processes)
    rows = pool.recv()
    pool.send(np.zeros(4, np.int32), rows.env_id)  # still stepping
    pool.close()
    assert living() == []
    assert Counter.closed - closed == (0 if processes else 4)  # processes have a count of their own
    assert set(threading.enumerate()) == threads


def test_pool_that_could_not_be_made_leaves_nothing_behind() -> None:
    with pytest.raises(EnvFailed, match="no licence for this simulator"):
        make_pool(env_id="tests.simulators:fail", processes=True)
    eventually(lambda: living() == [])


PARENT = """
import multiprocessing, time
import numpy as np
from envs_server.gym import GymPool
from seedrl.wire.messages import Welcome

if __name__ == "__main__":
    hangs = {"trouble": "hang", "at": 1}
    welcome = Welcome(1, "tests.simulators:Counter", hangs, num_envs=1, group_size=1, seed=1, processes=True)
    pool = GymPool(welcome, 1)
    pool.send(np.zeros(1, np.int32), pool.recv().env_id)
    print(multiprocessing.active_children()[0].pid, flush=True)
    time.sleep(600)
"""


def test_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    """The process ends even while its environment hangs."""
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, str(tmp_path / "parent.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    eventually(lambda: not Path(f"/proc/{child}").exists())


def test_lambda_in_processes_is_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^env\.processes=true starts another Python process, which has to find"):
        make_pool(lambda: Counter(), processes=True)


def test_program_that_would_start_itself_again_in_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "name", f"{shares.PREFIX}0 to 3")
    with pytest.raises(ConfigError, match=r'put Actor(.*) below if __name__ == "__main__"'):
        shares.expect_first_process()


# What makes them.


def test_environment_that_a_module_registers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    monkeypatch.setattr(gymnasium, "registry", gymnasium.envs.registration.registry)
    gymnasium.register(id="Mine-v0", entry_point=Nested)
    assert isinstance(find_env("tests.simulators:Mine-v0")().unwrapped, Nested)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no_such_module:make", r"there is no module no_such_module, neither installed nor in "),
        ("gymnasium:NoSuch-v0", "gymnasium has no NoSuch-v0, and gymnasium says: .*NoSuch"),
        ("gymnasium:make", "gymnasium has no make, and"),
        ("gymnasium:os:Env-v0", "gymnasium has no os:Env-v0, and"),
        ("tests.simulators:NOT_CALLABLE", "tests.simulators has no NOT_CALLABLE, and"),
    ],
)
def test_environment_that_is_not_there_is_named(path: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"^env\.id={path}: {why}"):
        find_env(path)


@BOTH
def test_options_that_do_not_fit_are_named(processes: bool) -> None:
    with pytest.raises(ConfigError, match=r"^the environment cannot be made with env.options=.*: .*'wings'"):
        make_pool(processes=processes, options={"wings": 2})


@pytest.mark.parametrize("missing", ["observation_space", "action_space", "reset", "step"])
def test_environment_without_something_it_needs_is_refused(missing: str) -> None:
    members = {name: getattr(Counter, name) for name in ("observation_space", "action_space", "reset", "step")}
    del members[missing]
    with pytest.raises(ConfigError, match=rf"^Mine has no {missing}, which an environment needs$"):
        Envs(type("Mine", (), members), {}, [1])


def test_environments_that_are_not_alike_are_refused() -> None:
    sizes = iter(range(2, 9))

    def make() -> Counter:
        env = Counter()
        env.action_space = discrete(next(sizes))
        return env

    with pytest.raises(EnvFailed, match="have to be alike"):
        make_pool(make, threads=2)
