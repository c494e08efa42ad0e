"""Environments with Gymnasium's interface, gymnasium's own or yours, as a pool. Knows nothing of streams.

All it asks of one: `observation_space`, `action_space`, `reset(seed=…)` giving (observation, info), and `step(action)`
giving (observation, reward, terminated, truncated, info). An `action_mask` in info, as Gymnasium's Taxi has, becomes
part of the observation.

A group's environments are split into shares: each has a thread, or a process where Python itself takes the time.
"""

import importlib
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs_server import spaces
from seedrl.errors import ConfigError
from seedrl.specs import MASK, Arrays, ArraySpec, EnvSpec, as_tree, each, leaves, rows_of
from seedrl.wire.codec import ENDED, RESET, TERMINATED, TRUNCATED, Job, Rows

OBSERVATION = "observation"  # the leaf beside a mask that came with info
START_SECONDS = 60.0  # for a process to make its environments
END_SECONDS = 2.0

MakeEnv = Callable[..., Any]  # called with env.options


class Stepped(NamedTuple):
    """The newest rows of some environments, in their order."""

    observation: Arrays  # [n, ...]
    reward: NDArray[np.float32]
    flags: NDArray[np.uint8]


def find_env(path: str) -> MakeEnv:
    """What makes the environments of `your.module:make`, or of `gymnasium:ID` and any `module:ID` it registers."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"env.id={path}: {error}; is it installed where the actor runs?") from error
    if callable(make := getattr(module, name, None)):
        return make  # type: ignore[no-any-return]
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(f"env.id={path}: {module_name} has no {name}, and there is no gymnasium to ask") from error
    if name not in gymnasium.registry:
        raise ConfigError(
            f"env.id={path}: {module_name} has no {name}, and gymnasium knows no environment of that name"
        )
    return lambda **options: gymnasium.make(name, **options)


class Envs:
    """Some environments, stepped one after the other. One that has ended is reset by its next action."""

    def __init__(self, make_env: MakeEnv | str, options: dict[str, Any], seeds: Sequence[int]) -> None:
        make = find_env(make_env) if isinstance(make_env, str) else make_env
        self._envs = [make(**options) for _ in seeds]
        self._seeds: list[int | None] = list(seeds)
        self._begins = [True] * len(seeds)
        self._action_space = self._envs[0].action_space
        self._observation_space = self._envs[0].observation_space
        self._first = [self._reset(number) for number in range(len(seeds))]
        self._has_mask = MASK in self._first[0][1] and not hasattr(self._observation_space, "spaces")
        self.spec = self._spec(options)

    def _spec(self, options: dict[str, Any]) -> EnvSpec:
        spec = spaces.spec_of(self._observation_space, self._action_space, type(self._envs[0]).__name__)
        if not self._has_mask:
            return spec
        mask = np.asarray(self._first[0][1][MASK])
        return EnvSpec({MASK: ArraySpec(mask.shape, "int8"), OBSERVATION: spec.observations[0]}, spec.action)

    def _reset(self, number: int) -> tuple[Any, dict[str, Any]]:
        seed, self._seeds[number] = self._seeds[number], None  # the first time only: later resets go on from there
        observation, info = self._envs[number].reset(seed=seed)
        return observation, info

    def first(self) -> Stepped:
        """The rows they begin with."""
        rows = [(observation, 0.0, RESET, info) for observation, info in self._first]
        self._begins = [False] * len(rows)
        return self._stepped(rows)

    def step(self, action: Arrays) -> Stepped:
        rows = []
        for number in range(len(self._envs)):
            if self._begins[number]:
                observation, info = self._reset(number)
                rows.append((observation, 0.0, RESET, info))
                self._begins[number] = False
            else:
                rows.append(self._step(number, action))
        return self._stepped(rows)

    def _step(self, number: int, action: Arrays) -> tuple[Any, float, int, dict[str, Any]]:
        own = spaces.chosen(each(lambda leaf: leaf[number], action), self._action_space)
        observation, reward, terminated, truncated, info = self._envs[number].step(own)
        flags = TERMINATED if terminated else TRUNCATED if truncated else 0
        self._begins[number] = bool(flags & ENDED)
        return observation, float(reward), flags, info

    def _stepped(self, rows: list[tuple[Any, float, int, dict[str, Any]]]) -> Stepped:
        observations, rewards, flags, infos = zip(*rows, strict=True)
        trees = [spaces.observed(observation, self._observation_space, rows=1) for observation in observations]
        joined = as_tree(trees[0], [np.concatenate(column) for column in zip(*map(leaves, trees), strict=True)])
        if self._has_mask:
            assert not isinstance(joined, dict)
            joined = {MASK: np.array([info[MASK] for info in infos], np.int8), OBSERVATION: joined}
        return Stepped(joined, np.array(rewards, np.float32), np.array(flags, np.uint8))

    def render(self) -> NDArray[Any] | None:
        """The first of them as people see it, if it was made with render_mode=rgb_array."""
        env = self._envs[0]
        frame = env.render() if getattr(env, "render_mode", None) == "rgb_array" else None
        return None if frame is None else np.asarray(frame)

    def close(self) -> None:
        for env in self._envs:
            if hasattr(env, "close"):
                env.close()


class RemoteEnvs:
    """The same in a process of its own, which ends with this one."""

    def __init__(self, make_env: MakeEnv | str, options: dict[str, Any], seeds: Sequence[int]) -> None:
        # Not forked: this process has threads of gRPC's.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, make_env, options, list(seeds)), name="environments", daemon=True
        )
        self._process.start()
        theirs.close()
        if not self._pipe.poll(START_SECONDS):
            raise ConfigError(f"a process could not make its environments within {START_SECONDS:.0f} s")
        self.spec: EnvSpec = self._answer()

    def first(self) -> Stepped:
        return self._ask("first")

    def step(self, action: Arrays) -> Stepped:
        return self._ask("step", action)

    def _ask(self, method: str, *arguments: Any) -> Stepped:
        self._pipe.send((method, arguments))
        stepped: Stepped = self._answer()
        return stepped

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join(END_SECONDS)
            raise RuntimeError(f"a process of environments ended with code {self._process.exitcode}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join(END_SECONDS)
        if self._process.is_alive():
            self._process.kill()


def _serve(pipe: Connection, make_env: MakeEnv | str, options: dict[str, Any], seeds: list[int]) -> None:
    """The process's side, until the other end closes."""
    try:
        envs = Envs(make_env, options, seeds)
        pipe.send(envs.spec)
        while True:
            method, arguments = pipe.recv()
            pipe.send(getattr(envs, method)(*arguments))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except Exception as error:
        pipe.send(RuntimeError(repr(error)))


class GymPool:
    """`recv` and `send` may be called from two threads. Groups come back in the order they were sent."""

    def __init__(self, job: Job, threads: int, make_env: MakeEnv | None = None) -> None:
        make = make_env or job.env_id
        kind = RemoteEnvs if job.processes else Envs
        shares = max(1, min(job.group_size, threads or len(os.sched_getaffinity(0))))
        seeds = np.random.SeedSequence(job.seed).generate_state(job.num_envs) >> 1
        groups = np.arange(job.num_envs, dtype=np.int32).reshape(-1, job.group_size)
        self._executor = ThreadPoolExecutor(shares * len(groups), "environments")
        self._shares: dict[int, list[Any]] = {}  # first environment of the group → its shares
        for group in groups:
            parts = [seeds[part].tolist() for part in np.array_split(group, shares)]
            self._shares[int(group[0])] = list(self._executor.map(lambda part: kind(make, job.options, part), parts))
        self.spec: EnvSpec = self._shares[0][0].spec
        self._stepping: deque[tuple[NDArray[np.int32], list[Future[Stepped]]]] = deque()
        for group in groups:
            self._stepping.append((group, [self._executor.submit(each.first) for each in self._of(group)]))

    def recv(self) -> Rows:
        env_id, futures = self._stepping.popleft()
        parts = [future.result() for future in futures]
        observations = zip(*(leaves(part.observation) for part in parts), strict=True)
        return Rows(
            env_id,
            as_tree(parts[0].observation, [np.concatenate(column) for column in observations]),
            np.concatenate([part.reward for part in parts]),
            np.concatenate([part.flags for part in parts]),
        )

    def send(self, action: Arrays, env_id: NDArray[np.int32]) -> None:
        shares = self._of(env_id)
        futures, at = [], 0
        for share, part in zip(shares, np.array_split(env_id, len(shares)), strict=True):
            futures.append(self._executor.submit(share.step, rows_of(action, at, len(part))))
            at += len(part)
        self._stepping.append((env_id, futures))

    def render(self) -> NDArray[Any] | None:
        """The first environment as people see it; only between steps, and not of one in a process of its own."""
        share = self._shares[0][0]
        return share.render() if isinstance(share, Envs) else None

    def _of(self, group: NDArray[np.int32]) -> list[Any]:
        return self._shares[int(group[0])]

    def close(self) -> None:
        for shares in self._shares.values():
            for share in shares:
                share.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
