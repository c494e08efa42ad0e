"""Examines an environment for `seedrl check`: interface, spaces, numbers, seeding, ends of episodes, speed.

Each check is a function that yields findings in words for people. Knows nothing of streams, models or settings.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs_server.first_rows import faults_of_rows
from envs_server.pool import Pool, make_pool
from envs_server.spaces import ActionSpace, ObservationSpace
from envs_server.stepping import (
    MakeEnv,
    expect_interface,
    expect_number,
    expect_step,
    find_env,
    made,
    players_of,
    reset,
    said_of,
)
from seedrl.errors import EnvFailed
from seedrl.plugins import OWN
from seedrl.rows import ENDED, RESET, TERMINATED, Rows
from seedrl.sizes import available_cores
from seedrl.specs import MASK, Arrays, ContinuousSpec, EnvSpec, as_tree, leaves, tree_map
from seedrl.tracebacks import failed
from seedrl.wire.messages import Welcome

INTERFACE_STEPS = 200  # of one environment, without a pool
COMPARED = 100  # rows of two episodes with the same seed
PLAY_SECONDS = 10.0  # for the steps of one pool; a slow environment gets fewer
SHOWN = 5  # faults of one kind
GROUP = 8  # environments whose speed is measured
SPEED_STEPS, SPEED_SECONDS = 20_000, 1.5
MANY = 10_000  # steps per second that a learner may take


class Finding(NamedTuple):
    level: str  # ok | note | warning | error
    about: str
    words: str
    traceback: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<8} {self.about:<10} {self.words}"
        return f"{line}\n{self.traceback}" if self.traceback else line


class Played(NamedTuple):
    """Some steps of a pool: its rows, and how long they took."""

    rows: list[Rows]
    steps: int  # all rows but resets
    seconds: float  # spent in the pool


def check_env(make_env: MakeEnv, steps: int = 1000, **options: Any) -> list[Finding]:
    """Examine environments of a program of its own, and print the findings: `make_env(**options)` makes one."""
    found, players = [], players_of(made(make_env, options))
    for finding in examine(Welcome(0, OWN, options, players, players, 1, players=players), steps, [], make_env):
        print(finding, flush=True)
        found.append(finding)
    return found


def examine(job: Welcome, steps: int, specs: list[EnvSpec], make_env: MakeEnv | None = None) -> Iterator[Finding]:
    """Yield the findings of the one environment of a job, and append its spec to `specs` if that is known."""
    if job.players == 1 and (make_env is not None or ":" in job.env_id):
        found = list(guarded("interface", lambda: examine_interface(make_env or find_env(job.env_id), job.options)))
        yield from found
        if any(finding.level == "error" for finding in found):
            return
    played: list[Played] = []
    yield from guarded("spaces", lambda: _examine_pool(job, steps, make_env, specs, played))
    if played:
        yield from guarded("seeding", lambda: _seeding(job, make_env, played[0]))
        yield from _ends(played[0])
        yield from _rewards(played[0])
        yield from guarded("speed", lambda: _speed(job, make_env))


def guarded(about: str, checks: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Turn an error of a check into a finding."""
    try:
        yield from checks()
    except Exception as error:
        failure = failed(EnvFailed, f"the {about} cannot be examined", error)
        yield Finding("error", about, str(failure), failure.traceback)


# One environment with Gymnasium's interface, as it is.


def examine_interface(make: MakeEnv, options: dict[str, Any]) -> Iterator[Finding]:
    """Make one environment and step it with random actions; compare what it returns with its spaces."""
    env = made(make, options)
    try:
        expect_interface(env)
        faults = dict.fromkeys(_interface_faults(env))
    finally:
        if hasattr(env, "close"):
            env.close()
    for level, words in list(faults)[:SHOWN]:
        yield Finding(level, "interface", words)
    if not any(level == "error" for level, _ in faults):
        yield Finding("ok", "interface", "reset(seed=…) and step(action) return what Gymnasium's interface asks for")


def _interface_faults(env: Any) -> Iterator[tuple[str, str]]:
    observations, actions = ObservationSpace(env.observation_space), ActionSpace(env.action_space)
    spec, random = EnvSpec(observations.spec, actions.spec), np.random.default_rng(1)
    (observation, info), method = reset(env, 1), "reset"
    for _ in range(INTERFACE_STEPS):
        faults = list(observations.faults(observation))
        yield from (("error", said_of(env, method, fault)) for fault in faults)
        excesses = [] if faults else observations.excesses(observation)
        yield from (("warning", said_of(env, method, excess)) for excess in excesses)
        action = random_action(spec, random, _allowed(info, observation))
        own = actions.nested(tree_map(lambda leaf: leaf[0], action))
        observation, reward, terminated, truncated, info = expect_step(env, env.step(own))
        if not math.isfinite(expect_number(env, reward)):
            yield "error", said_of(env, "step", f"the reward must be finite; step returned {reward}")
        if not isinstance(info, dict):
            yield "error", said_of(env, "step", f"info must be a dict; step returned {type(info).__name__}")
            return
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                words = f"{name} should be a bool; step returned {type(flag).__name__}"
                yield "warning", said_of(env, "step", words)
        method = "step"
        if terminated or truncated:
            (observation, info), method = reset(env, None), "reset"


def _allowed(info: dict[str, Any], observation: Any) -> NDArray[Any] | None:
    """Return the mask of choices, if there is one where Gymnasium's environments have it."""
    mask = info.get(MASK, observation.get(MASK) if isinstance(observation, dict) else None)
    return None if mask is None else np.ravel(mask)


def random_action(spec: EnvSpec, random: np.random.Generator, allowed: NDArray[Any] | None) -> Arrays:
    """Return random actions [1, ...] of one environment; `allowed` has a number for every choice, and 0 forbids it."""
    found, at = [], 0
    for leaf in spec.actions:
        if isinstance(leaf, ContinuousSpec):
            found.append(_random_numbers(leaf, random))
            continue
        chosen = []
        for size in leaf.sizes:
            choices = np.arange(size) if allowed is None else np.flatnonzero(allowed[at : at + size])
            chosen.append(random.choice(choices) if len(choices) else 0)
            at += size
        found.append(np.array(chosen, leaf.dtype).reshape(1, *leaf.shape))
    actions: Arrays = as_tree(spec.action, found)
    return actions


def _random_numbers(leaf: ContinuousSpec, random: np.random.Generator) -> NDArray[Any]:
    low, high = np.array(leaf.low), np.array(leaf.high)
    is_finite = np.isfinite(low) & np.isfinite(high)
    drawn = random.uniform(np.where(is_finite, low, -1.0), np.where(is_finite, high, 1.0))
    return np.clip(drawn, low, high).astype(leaf.dtype).reshape(1, *leaf.shape)


# The pool, as an actor has it: with wrappers, from envpool or not.


def _examine_pool(
    job: Welcome, steps: int, make_env: MakeEnv | None, specs: list[EnvSpec], played: list[Played]
) -> Iterator[Finding]:
    """Play in a pool; append its spec and what was played for the checks that follow."""
    with closing(make_pool(job, 1, make_env)) as pool:
        specs.append(pool.spec)
        yield Finding("ok", "spaces", str(pool.spec))
        result = play(pool, steps)
    faults = dict.fromkeys(fault for rows in result.rows for fault in faults_of_rows(rows, pool.spec, job.num_envs))
    for fault in list(faults)[:SHOWN]:
        yield Finding("error", "rows", fault)
    if not faults:
        yield Finding("ok", "rows", f"{result.steps:,} steps have the shapes and types of the spaces, and are finite")
        played.append(result)


def play(pool: Pool, steps: int, seconds: float = PLAY_SECONDS, clock: Callable[[], float] = time.monotonic) -> Played:
    """Step the environments of a pool, one group, with random actions: this many steps, if there is time for them."""
    random, history = np.random.default_rng(1), []
    counted, spent = 0, 0.0
    while counted < steps and spent < seconds:
        began = clock()
        rows = pool.recv()
        spent += clock() - began
        history.append(rows._replace(observation=tree_map(np.copy, rows.observation)))
        counted += int(np.count_nonzero(rows.flags & RESET == 0))
        actions = [random_action(pool.spec, random, allowed) for allowed in _masks(rows, pool.spec)]
        joined = as_tree(pool.spec.action, [np.concatenate(each) for each in zip(*map(leaves, actions), strict=True)])
        began = clock()
        pool.send(joined, rows.env_id)
        spent += clock() - began
    return Played(history, counted, spent)


def _masks(rows: Rows, spec: EnvSpec) -> list[NDArray[Any] | None]:
    """Return the choices that are allowed in each row; None for all."""
    if spec.mask is None or not isinstance(rows.observation, dict):
        return [None] * len(rows.env_id)
    return [np.ravel(mask) for mask in rows.observation[spec.mask]]


def _seeding(job: Welcome, make_env: MakeEnv | None, played: Played) -> Iterator[Finding]:
    """Play with the same seed and with another one."""
    with closing(make_pool(job, 1, make_env)) as pool:
        same = play(pool, COMPARED)
    with closing(make_pool(job._replace(seed=job.seed + 1), 1, make_env)) as pool:
        other = play(pool, COMPARED)
    if (row := _first_difference(played, same)) is not None:
        yield Finding("warning", "seeding", f"two episodes of the same seed and actions differ, first in row {row}")
    else:
        yield Finding("ok", "seeding", "the same seed and actions give the same episode")
    if _first_difference(played, other) is None:
        yield Finding("warning", "seeding", "different seeds give the same episode: all environments would be alike")


def _first_difference(one: Played, two: Played) -> int | None:
    for row, (a, b) in enumerate(zip(one.rows[:COMPARED], two.rows, strict=False)):
        if not all(map(np.array_equal, _arrays(a), _arrays(b))):
            return row
    return None


def _arrays(rows: Rows) -> list[NDArray[Any]]:
    return [*leaves(rows.observation), rows.reward, rows.flags]


def _ends(played: Played) -> Iterator[Finding]:
    flags = np.concatenate([rows.flags for rows in played.rows])
    ends, terminated = int(np.count_nonzero(flags & ENDED)), int(np.count_nonzero(flags & TERMINATED))
    if not ends:
        words = "a return is known only when an episode ends; does it have a time limit?"
        yield Finding("note", "ends", f"no episode ended within {played.steps:,} steps: {words}")
        return
    how = f"{terminated} terminated and {ends - terminated} truncated"
    yield Finding("ok", "ends", f"{ends} episodes ended within {played.steps:,} steps, {how}")


def _rewards(played: Played) -> Iterator[Finding]:
    rewards = np.concatenate([rows.reward for rows in played.rows])
    low, high = float(rewards.min()), float(rewards.max())
    if low == high == 0:
        yield Finding("note", "rewards", "random actions got no reward at all; learning begins with the first one")
    else:
        yield Finding("ok", "rewards", f"from {low:g} to {high:g} with random actions")


def _speed(job: Welcome, make_env: MakeEnv | None) -> Iterator[Finding]:
    """Step a group of environments in one thread."""
    envs = GROUP * job.players
    with closing(make_pool(job._replace(num_envs=envs, group_size=envs), 1, make_env)) as pool:
        played = play(pool, SPEED_STEPS, SPEED_SECONDS)
    rate, cores = played.steps / max(played.seconds, 1e-9), available_cores()
    needed = math.ceil(MANY / rate)
    words = (
        f"{rate:,.0f} steps/s on one core, and about {rate * cores:,.0f} on the {cores} of this machine; a learner "
        f"that takes {MANY:,} steps/s needs actors on about {needed:,} {'core' if needed == 1 else 'cores'}"
    )
    yield Finding("ok", "speed", words)
