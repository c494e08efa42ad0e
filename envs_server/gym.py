"""Environments with Gymnasium's interface, gymnasium's own or yours, as a pool. Knows nothing of streams.

A group's environments are split into shares: each has a thread, or a process where Python itself takes the time.
Those behind an OpenEnv server have a thread each, because it waits for the network and needs no core.
"""

import time
from functools import partial
from operator import methodcaller
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs_server.openenv import is_openenv
from envs_server.shares import END_SECONDS, PREFIX, RemoteEnvs, Share, made_of
from envs_server.stepping import MakeEnv, Stepped
from seedrl.errors import EnvFailed
from seedrl.rows import Rows
from seedrl.sizes import available_cores
from seedrl.specs import Arrays, EnvSpec, as_tree, leaves, rows_of
from seedrl.wire.messages import Welcome


class Group:
    """Environments that step together. `parts` belongs to the thread that receives."""

    def __init__(self, shares: list[Share], first: list[int]) -> None:
        self.shares = shares
        self.parts: dict[Share, Stepped] = {}
        self._first = first  # environment of each share
        self._sizes: list[int] = []  # rows of each share that wait for actions

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
        self._sizes = [len(part.number) for part in parts]
        observations = zip(*(leaves(part.observation) for part in parts), strict=True)
        env_id = [first + part.number for first, part in zip(self._first, parts, strict=True)]
        return Rows(
            np.concatenate(env_id, dtype=np.int32),
            as_tree(parts[0].observation, [np.concatenate(column) for column in observations]),
            np.concatenate([part.reward for part in parts]),
            np.concatenate([part.flags for part in parts]),
        )


class GymPool:
    """`recv` and `send` may be called from two threads. The group that is done first comes first."""

    def __init__(self, job: Welcome, threads: int, make_env: MakeEnv | None = None) -> None:
        self._job = job
        self._make_env = make_env or job.env_id
        simulations, together = job.num_envs // job.players, job.group_size // job.players
        self._seeds = (np.random.SeedSequence(job.seed).generate_state(simulations) >> 1).tolist()
        self._answers: SimpleQueue[tuple[Share | None, Any]] = SimpleQueue()
        self._group_of: dict[Share, Group] = {}
        shares = together if is_openenv(job.env_id) else max(1, min(together, threads or available_cores()))
        groups = np.arange(simulations).reshape(-1, together)
        self._groups = [self._make_group(numbers, shares) for numbers in groups]
        try:
            self.spec = self._agreed()
        except BaseException:
            self.close()
            raise
        for group in self._groups:
            group.begin()

    def _make_group(self, simulations: NDArray[np.int64], shares: int) -> Group:
        parts = [part.tolist() for part in np.array_split(simulations, shares)]
        group = Group([self._make_share(part) for part in parts], [part[0] * self._job.players for part in parts])
        self._group_of.update(dict.fromkeys(group.shares, group))
        return group

    def _make_share(self, simulations: list[int]) -> Share:
        name = f"{PREFIX}{simulations[0]} to {simulations[-1]}"
        seeds = [self._seeds[number] for number in simulations]
        arguments = (self._make_env, self._job.options, seeds, self._job.players)
        make = partial(RemoteEnvs, name, *arguments) if self._job.processes else partial(made_of, *arguments)
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
