"""A wrapper of pools that writes down what environments returned and which actions they were given.

Actors find it with env.wrappers=[tests.recording:Recorder]; the file is that of the environment's option `record`.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seedrl.rows import Rows
from seedrl.specs import Arrays

VARIABLE = "SEEDRL_TEST_RECORD"  # names the file


class Recorder:
    """Passes everything on, and appends a line for every action: env, observation, reward, flags, action."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._path = Path(os.environ[VARIABLE])
        self._newest: dict[int, dict[str, Any]] = {}
        self.spec = pool.spec
        self.close = pool.close

    def recv(self) -> Rows:
        rows: Rows = self._pool.recv()
        for at, env in enumerate(rows.env_id.tolist()):
            observation = np.asarray(rows.observation)[at].tolist()
            reward, flags = float(rows.reward[at]), int(rows.flags[at])
            self._newest[env] = {"env": env, "observation": observation, "reward": reward, "flags": flags}
        return rows

    def send(self, action: Arrays, env_id: NDArray[np.int32]) -> None:
        with self._path.open("a") as file:
            for env, taken in zip(env_id.tolist(), np.asarray(action).tolist(), strict=True):
                file.write(json.dumps({**self._newest[env], "action": taken}) + "\n")
        self._pool.send(action, env_id)
