"""Environments that count: whatever is lost, doubled or mixed up on its way to the learner and back shows.

Every observation tells which pool, environment and step it is from, and the one right action for it follows from that.
The pool checks the actions it is given; tests/chaos/model.py checks what is trained on. Knows nothing of streams.

Actors find it with env.id=mock and env.wrappers=[tests.chaos.counting:counting].
"""

import secrets
import time
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs_server.mock import MockPool
from seedrl.errors import ConfigError
from seedrl.rows import ENDED, RESET, TERMINATED, TRUNCATED, Rows
from seedrl.specs import Arrays, ArraySpec, EnvSpec, discrete
from seedrl.wire.messages import Welcome

COUNTING = "counting"
NUM_ACTIONS = 31
NONCE, ENV, STEP, AGE, FLAGS = range(5)  # entries of a signature
SIGNATURE = 5
BEHIND = 1000  # steps of the others after which an action that has not come never will


MODULE = "tests.chaos.counting"  # which actors have to be allowed
WRAPPER = f"{MODULE}:counting"


def mock_options(size: int = 5, longest: int = 40, step_seconds: float = 0.0) -> dict[str, Any]:
    """Return the env.options with which the mock environment becomes this one."""
    shape = {"shape": [size], "dtype": "int32", "num_actions": NUM_ACTIONS}
    return {**shape, "episode_length": longest, "step_seconds": step_seconds}


def counting(pool: MockPool) -> "CountingPool":
    """Return a counting pool in the place of a mock pool."""
    options = pool.job.options
    own = {"size": options["shape"][0], "longest": options["episode_length"], "step_seconds": options["step_seconds"]}
    return CountingPool(pool.job._replace(options=own))


def right_action(signature: Any) -> Any:
    """The action for observations [..., SIGNATURE] of integers, of numpy or torch."""
    return (signature[..., NONCE] + 7 * signature[..., ENV] + 3 * signature[..., STEP]) % NUM_ACTIONS


class CountingPool:
    """Observations are signatures, repeated until the row is full; episodes of any length end one way or the other.

    The nonce is unlike that of any other pool; `step` counts all rows of an environment, `age` those of its episode.
    Options: size (entries of an observation), longest (episode), step_seconds (of a group). `recv` and `send` may be
    called from two threads.
    """

    def __init__(self, job: Welcome) -> None:
        options = {"size": SIGNATURE, "longest": 40, "step_seconds": 0.0, **job.options}
        if len(options) > 3 or options["size"] < SIGNATURE:
            raise ConfigError(
                f"env.options={job.options}: {COUNTING} takes size (of {SIGNATURE} or more), longest and step_seconds"
            )
        self._size = int(options["size"])
        self.spec = EnvSpec(ArraySpec((self._size,), "int32"), discrete(NUM_ACTIONS))
        self._longest = int(options["longest"])
        self._step_seconds = float(options["step_seconds"])
        self._random = np.random.default_rng(job.seed)
        self._signature = np.zeros((job.num_envs, SIGNATURE), np.int32)  # of the newest row of each environment
        self._signature[:, NONCE] = secrets.randbelow(2**30)
        self._signature[:, ENV] = np.arange(job.num_envs)
        self._signature[:, STEP] = -1
        self._signature[:, FLAGS] = TERMINATED  # of nothing: the first row is a reset
        self._length = np.zeros(job.num_envs, np.int64)  # of the episode
        self._waits = np.zeros(job.num_envs, np.bool_)  # for the action to its newest row
        self._done_stepping = deque(np.arange(job.num_envs, dtype=np.int32).reshape(-1, job.group_size))

    def recv(self) -> Rows:
        if self._step_seconds:
            time.sleep(self._step_seconds)
        env_id = self._done_stepping.popleft()
        self._advance(env_id)
        signature = self._signature[env_id]
        self._waits[env_id] = True
        repeats = -(-self._size // SIGNATURE)
        observation = np.tile(signature, repeats)[:, : self._size]
        reward = (signature[:, AGE] > 0).astype(np.float32)
        return Rows(env_id, observation, reward, signature[:, FLAGS].astype(np.uint8))

    def send(self, action: Arrays, env_id: NDArray[np.int32]) -> None:
        assert not isinstance(action, dict)
        signature = self._signature[env_id]
        doubled = ~self._waits[env_id]
        if doubled.any():
            raise ValueError(f"a doubled action: {_named(signature[doubled][0])} has one already")
        right = right_action(signature.astype(np.int64))
        if len(action) != len(right):
            raise ValueError(f"missing actions: {len(right)} environments got {len(action)}")
        wrong = action != right
        if wrong.any():
            raise ValueError(f"a wrong action: {_named(signature[wrong][0])} got {action[wrong][0]}")
        self._waits[env_id] = False
        self._check_for_missing()
        self._done_stepping.append(env_id)

    def close(self) -> None:
        pass

    def _advance(self, env_id: NDArray[np.int32]) -> None:
        """The next row of these environments: a reset after an end, an end when the episode is long enough."""
        signature = self._signature[env_id]
        reset = (signature[:, FLAGS] & ENDED) != 0
        self._length[env_id[reset]] = self._random.integers(1, self._longest + 1, np.count_nonzero(reset))
        signature[:, STEP] += 1
        signature[:, AGE] = np.where(reset, 0, signature[:, AGE] + 1)
        ending = np.where(self._length[env_id] % 3 == 0, TRUNCATED, TERMINATED)
        ended = signature[:, AGE] == self._length[env_id]
        signature[:, FLAGS] = np.where(reset, RESET, np.where(ended, ending, 0))
        self._signature[env_id] = signature

    def _check_for_missing(self) -> None:
        step = self._signature[:, STEP]
        last = int(np.argmin(step))
        if self._waits[last] and step.max() - step[last] > BEHIND:
            raise ValueError(f"a missing action: {_named(self._signature[last])} has waited for {BEHIND} steps")


def _named(signature: NDArray[np.int32]) -> str:
    right = right_action(signature.astype(np.int64))
    return f"step {signature[STEP]} of environment {signature[ENV]}, pool {signature[NONCE]}, right {right},"
