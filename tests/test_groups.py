"""The end of a process whose environments are still stepping."""

import subprocess
import sys

import pytest

PROGRAM = """
import threading, time, warnings
import numpy as np
import envs_server.groups
from envs_server.groups import SteppingGroups

warnings.simplefilter("ignore")
import envpool

envs_server.groups.RETURN_SECONDS = 0.0  # as if a step took longer
envs = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=4, batch_size=4, num_threads=1)
envs.async_reset()
inside = threading.Event()


class Slow:
    def recv(self):
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            envs.recv()
            envs.send(np.zeros(4, np.int32), np.arange(4, dtype=np.int32))
            inside.set()


leaving = threading.Event()
groups = SteppingGroups(leaving)
groups.built(Slow(), 1)
threading.Thread(target=groups.recv, daemon=True).start()
inside.wait()
leaving.set()
groups.leave()
"""


def test_process_that_ends_while_environments_step_waits_for_them_and_is_not_aborted() -> None:
    """A thread that returns from envpool while Python is torn down ends the process with SIGABRT."""
    pytest.importorskip("envpool")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
