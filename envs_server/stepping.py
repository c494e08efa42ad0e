"""Environments with Gymnasium's interface, some at a time, one after the other. Knows nothing of threads or processes.

All that is asked of one: `observation_space`, `action_space`, `reset(seed=…)` giving (observation, info), and
`step(action)` giving (observation, reward, terminated, truncated, info). An `action_mask` in info, as Gymnasium's Taxi
has, becomes part of the observation.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs_server import openenv
from envs_server.first_rows import FIRST_STEPS
from envs_server.masks import beside_mask, mask_spec, with_mask
from envs_server.spaces import ActionSpace, ObservationSpace, spec_of
from seedrl.errors import ConfigError, EnvFailed
from seedrl.plugins import import_module
from seedrl.rows import RESET, TERMINATED, TRUNCATED
from seedrl.specs import MASK, Arrays, tree_map
from seedrl.tracebacks import failed, is_of_the_call, place_of, place_of_code

GYMNASIUM = "gymnasium"

MakeEnv = Callable[..., Any]  # called with env.options


class Stepped(NamedTuple):
    """The newest rows of some environments, in their order."""

    number: NDArray[np.int32]  # [n]  of the environment, counted from the first of these
    observation: Arrays  # [n, ...]
    reward: NDArray[np.float32]
    flags: NDArray[np.uint8]


class Row(NamedTuple):
    """The newest row of one environment."""

    observation: Any
    reward: float
    flags: int
    info: dict[str, Any]


def find_env(path: str) -> MakeEnv:
    """Return what makes an environment of `your.module:make`, `openenv:URL`, or `gymnasium:ID`, `module:ID`."""
    if openenv.is_openenv(path):
        return openenv.find(path)
    module_name, _, name = path.partition(":")
    module = import_module("env.id", path)
    # Of gymnasium itself only what is registered: gymnasium:make would import whatever the learner names.
    if module_name != GYMNASIUM and callable(make := getattr(module, name, None)):
        return make  # type: ignore[no-any-return]
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(f"env.id={path}: {module_name} has no {name}, and there is no gymnasium to ask") from error
    try:
        if name not in gymnasium.registry:  # first: a name with a colon would be imported
            gymnasium.spec(name.replace(":", " "))
    except gymnasium.error.Error as error:
        raise ConfigError(f"env.id={path}: {module_name} has no {name}, and gymnasium says: {error}") from error
    return lambda **options: gymnasium.make(name, **options)


class Envs:
    """Owned by one thread. An environment that has ended is reset by its next action, which is ignored."""

    def __init__(self, make_env: MakeEnv | str, options: dict[str, Any], seeds: Sequence[int]) -> None:
        make = find_env(make_env) if isinstance(make_env, str) else make_env
        self._envs = [made(make, options) for _ in seeds]
        one = self._envs[0]
        expect_interface(one)
        spec = spec_of(one.observation_space, one.action_space, type(getattr(one, "unwrapped", one)).__name__)
        self._observations, self._actions = ObservationSpace(one.observation_space), ActionSpace(one.action_space)
        self._begins = [False] * len(seeds)
        self._unchecked = FIRST_STEPS * len(seeds)  # rows whose observations are compared with the space
        self._first = [self._reset(number, seed) for number, seed in enumerate(seeds)]
        self._mask = mask_spec(self._first[0].info, spec)
        self.spec = spec if self._mask is None else with_mask(spec, self._mask)

    def first(self) -> Stepped:
        """Return the rows that the environments begin with."""
        return self._stepped(self._first)

    def step(self, action: Arrays) -> Stepped:
        return self._stepped([self._next(number, action) for number in range(len(self._envs))])

    def _next(self, number: int, action: Arrays) -> Row:
        if self._begins[number]:
            return self._reset(number, None)  # the seed of the first reset decides the later ones
        own = self._actions.nested(tree_map(lambda leaf: leaf[number], action))
        env = self._envs[number]
        observation, reward, terminated, truncated, info = expect_step(env, env.step(own))
        self._begins[number] = bool(terminated or truncated)
        flags = TERMINATED if terminated else TRUNCATED if truncated else 0
        self._expect_observation(env, "step", observation)
        return Row(observation, expect_number(env, reward), flags, info)

    def _reset(self, number: int, seed: int | None) -> Row:
        self._begins[number] = False
        env = self._envs[number]
        observation, info = reset(env, seed)
        self._expect_observation(env, "reset", observation)
        return Row(observation, 0.0, RESET, info)

    def _expect_observation(self, env: Any, method: str, observation: Any) -> None:
        if self._unchecked:
            self._unchecked -= 1
            for fault in self._observations.faults(observation):
                raise EnvFailed(said_of(env, method, fault))

    def _stepped(self, rows: Sequence[Row]) -> Stepped:
        observation = self._observations.stacked([row.observation for row in rows])
        if self._mask is not None:
            anything = np.ones(self._mask.shape, np.int8)
            mask = np.stack([np.asarray(row.info.get(MASK, anything), np.int8) for row in rows])
            observation = beside_mask(observation, mask)
        return Stepped(
            np.arange(len(rows), dtype=np.int32),
            observation,
            np.array([row.reward for row in rows], np.float32),
            np.array([row.flags for row in rows], np.uint8),
        )

    def render(self) -> NDArray[Any] | None:
        """Return a picture of the first environment, if it was made with render_mode=rgb_array."""
        env = self._envs[0]
        frame = env.render() if getattr(env, "render_mode", None) == "rgb_array" else None
        return None if frame is None else np.asarray(frame)

    def close(self) -> None:
        for env in self._envs:
            if hasattr(env, "close"):
                env.close()


def made(make: MakeEnv, options: dict[str, Any]) -> Any:
    """Make an environment. Raises ConfigError if it does not take these options, and EnvFailed if it raises."""
    try:
        return make(**options)
    except Exception as error:
        is_setting = isinstance(error, TypeError) and not place_of(error)
        kind = ConfigError if is_setting else EnvFailed
        raise failed(kind, f"the environment cannot be made with env.options={options}", error) from error


def expect_interface(env: Any) -> None:
    """Raise ConfigError for an environment that lacks something it needs."""
    for name in ("observation_space", "action_space", "reset", "step"):
        if not hasattr(env, name):
            raise ConfigError(f"{type(env).__name__} has no {name}, which an environment needs")
    if (players := players_of(env)) != 1:
        raise ConfigError(f"{type(env).__name__} has {players} players; set env.players={players} on the learner")


def players_of(env: Any) -> int:
    """Return how many players an environment has; those of PettingZoo list theirs by name."""
    return int(getattr(env, "players", 0)) or len(getattr(env, "possible_agents", ())) or 1


def reset(env: Any, seed: int | None) -> tuple[Any, dict[str, Any]]:
    """Reset an environment; return its observation and info. Raises EnvFailed if its interface is another one."""
    try:
        result = env.reset(seed=seed)
    except TypeError as error:
        if is_of_the_call(error):
            words = f"reset must take seed=…, as in Gymnasium: def reset(self, seed=None); {error}"
            raise EnvFailed(said_of(env, "reset", words)) from error
        raise
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        words = "reset must return (observation, info) with a dict as info, as in Gymnasium"
        raise EnvFailed(said_of(env, "reset", f"{words}; it returned {brief(result)}"))
    return result


def expect_step(env: Any, result: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
    """Return what `step` has returned. Raises EnvFailed if that is not what Gymnasium's interface asks for."""
    if not isinstance(result, tuple) or len(result) != 5:
        is_old = isinstance(result, tuple) and len(result) == 4
        hint = "; this is the interface of old Gym: return terminated and truncated instead of done" if is_old else ""
        words = "step must return (observation, reward, terminated, truncated, info), as in Gymnasium"
        raise EnvFailed(said_of(env, "step", f"{words}; it returned {brief(result)}{hint}"))
    return result


def expect_number(env: Any, reward: Any) -> float:
    """Return a reward as a float. Raises EnvFailed if it is not one number."""
    try:
        return float(np.asarray(reward).item())
    except (TypeError, ValueError) as error:
        words = f"the reward must be one number; step returned {brief(reward)}"
        raise EnvFailed(said_of(env, "step", words)) from error


def said_of(env: Any, method: str, words: str) -> str:
    """Return words about a method of an environment, after the place where the user has defined it."""
    place = place_of_code(getattr(type(getattr(env, "unwrapped", env)), method, None))
    return f"{place}: {words}" if place else words


def brief(value: Any) -> str:
    """Return the kind of a value in a few words, for a message."""
    if isinstance(value, tuple):
        return f"{len(value)} values ({', '.join(brief(each) for each in value[:6])})"
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__
