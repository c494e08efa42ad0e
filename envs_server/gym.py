"""Environments with Gymnasium's interface, gymnasium's own or yours, as a pool. Knows nothing of streams.

A group's environments are split into shares: each has a thread, or a process where Python itself takes the time.
"""

import time
from functools import partial
from operator import methodcaller
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs_server.shares import END_SECONDS, PREFIX, RemoteEnvs, Share
from envs_server.stepping import Envs, MakeEnv, Stepped
from seedrl.errors import EnvFailed
from seedrl.rows import Rows
from seedrl.sizes import available_cores
from seedrl.specs import Arrays, EnvSpec, as_tree, leaves, rows_of
from seedrl.wire.messages import Welcome


class Group:
    """Environments that step together. `parts` belongs to the thread that receives."""

    def __init__(self, env_id: NDArray[np.int32], shares: list[Share], sizes: list[int]) -> None:
        self.env_id = env_id
        self.shares = shares
        self.parts: dict[Share, Stepped] = {}
        self._sizes = sizes

    def begin(self) -> None:
        for share in self.shares:
            share.ask(methodcaller("first"))

    def send(self, action: Arrays) -> None:
        at = 0
        for share, size in zip(self.shares, self._sizes, strict=True):
            share.ask(methodcaller("step", rows_of(action, at, size)))
            at += size

    def take(self) -> Rows | None:
        """Return the rows of all shares once they are there."""
        if len(self.parts) < len(self.shares):
            return None
        parts = [self.parts.pop(share) for share in self.shares]
        observations = zip(*(leaves(part.observation) for part in parts), strict=True)
        return Rows(
            self.env_id,
            as_tree(parts[0].observation, [np.concatenate(column) for column in observations]),
            np.concatenate([part.reward for part in parts]),
            np.concatenate([part.flags for part in parts]),
        )


class GymPool:
    """`recv` and `send` may be called from two threads. The group that is done first comes first."""

    def __init__(self, job: Welcome, threads: int, make_env: MakeEnv | None = None) -> None:
        self._job = job
        self._make_env = make_env or job.env_id
        self._seeds = (np.random.SeedSequence(job.seed).generate_state(job.num_envs) >> 1).tolist()
        self._answers: SimpleQueue[tuple[Share | None, Any]] = SimpleQueue()
        self._group_of: dict[Share, Group] = {}
        shares = max(1, min(job.group_size, threads or available_cores()))
        all_ids = np.arange(job.num_envs, dtype=np.int32).reshape(-1, job.group_size)
        self._groups = [self._make_group(env_id, shares) for env_id in all_ids]
        try:
            self.spec = self._agreed()
        except BaseException:
            self.close()
            raise
        for group in self._groups:
            group.begin()

    def _make_group(self, env_id: NDArray[np.int32], shares: int) -> Group:
        parts = np.array_split(env_id, shares)
        group = Group(env_id, [self._make_share(part.tolist()) for part in parts], [len(part) for part in parts])
        self._group_of.update(dict.fromkeys(group.shares, group))
        return group

    def _make_share(self, env_id: list[int]) -> Share:
        name = f"{PREFIX}{env_id[0]} to {env_id[-1]}"
        arguments = (self._make_env, self._job.options, [self._seeds[number] for number in env_id])
        make = partial(RemoteEnvs, name, *arguments) if self._job.processes else partial(Envs, *arguments)
        return Share(name, make, self._answers)

    def _agreed(self) -> EnvSpec:
        """Wait until all environments are made."""
        for share in self._group_of:
            share.ask(lambda envs: envs.spec)
        specs = [self._answer()[1] for _ in self._group_of]
        for spec in specs[1:]:
            if spec != specs[0]:
                raise EnvFailed(f"environments have to be alike: one has {specs[0]}, another one {spec}")
        first: EnvSpec = specs[0]
        return first

    def _answer(self) -> tuple[Share, Any]:
        share, answer = self._answers.get()
        if share is None or isinstance(answer, Exception):
            raise answer
        return share, answer

    def recv(self) -> Rows:
        while True:
            share, stepped = self._answer()
            group = self._group_of[share]
            group.parts[share] = stepped
            if (rows := group.take()) is not None:
                return rows

    def send(self, action: Arrays, env_id: NDArray[np.int32]) -> None:
        self._groups[int(env_id[0]) // self._job.group_size].send(action)

    def render(self) -> NDArray[Any] | None:
        """Return a picture of the first environment; only between steps, and not if it is in another process."""
        if self._job.processes:
            return None
        self._groups[0].shares[0].ask(methodcaller("render"))
        frame: NDArray[Any] | None = self._answer()[1]
        return frame

    def abandon(self) -> None:
        """Let a thread that waits in `recv` return, and kill the processes."""
        self._answers.put((None, EnvFailed("the environments were abandoned")))
        for share in self._group_of:
            share.abandon()

    def close(self) -> None:
        """Wait for environments that are stepping, up to a limit: threads that hang stay behind."""
        for share in self._group_of:
            share.end()
        deadline = time.monotonic() + END_SECONDS
        late = [share for share in self._group_of if not share.join(max(0.0, deadline - time.monotonic()))]
        for share in late:
            share.abandon()
        for share in late:
            share.join(END_SECONDS / len(late))
