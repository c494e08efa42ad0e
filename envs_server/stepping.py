"""Environments with Gymnasium's interface, some at a time, one after the other. Knows nothing of threads or processes.

All that is asked of one: `observation_space`, `action_space`, `reset(seed=…)` giving (observation, info), and
`step(action)` giving (observation, reward, terminated, truncated, info). An `action_mask` in info, as Gymnasium's Taxi
has, becomes part of the observation.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs_server.spaces import ActionSpace, ObservationSpace, spec_of
from seedrl.errors import ConfigError
from seedrl.rows import RESET, TERMINATED, TRUNCATED
from seedrl.specs import MASK, Arrays, ArraySpec, EnvSpec, tree_map

OBSERVATION = "observation"  # the leaf beside a mask that came with info
GYMNASIUM = "gymnasium"

MakeEnv = Callable[..., Any]  # called with env.options


class Stepped(NamedTuple):
    """The newest rows of some environments, in their order."""

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
    """Return what makes an environment of `your.module:make`, `gymnasium:ID` or any `module:ID` that is registered."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"env.id={path}: {error}; is it installed where the actor runs?") from error
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
        self._envs = [_made(make, options) for _ in seeds]
        one = self._envs[0]
        for name in ("observation_space", "action_space", "reset", "step"):
            if not hasattr(one, name):
                raise ConfigError(f"{type(one).__name__} has no {name}, which an environment needs")
        spec = spec_of(one.observation_space, one.action_space, type(getattr(one, "unwrapped", one)).__name__)
        self._observations, self._actions = ObservationSpace(one.observation_space), ActionSpace(one.action_space)
        self._begins = [False] * len(seeds)
        self._first = [self._reset(number, seed) for number, seed in enumerate(seeds)]
        self._mask = _mask_spec(self._first[0].info, spec)
        self.spec = spec if self._mask is None else _with_mask(spec, self._mask)

    def first(self) -> Stepped:
        """Return the rows that the environments begin with."""
        return self._stepped(self._first)

    def step(self, action: Arrays) -> Stepped:
        return self._stepped([self._next(number, action) for number in range(len(self._envs))])

    def _next(self, number: int, action: Arrays) -> Row:
        if self._begins[number]:
            return self._reset(number, None)  # the seed of the first reset decides the later ones
        own = self._actions.nested(tree_map(lambda leaf: leaf[number], action))
        observation, reward, terminated, truncated, info = self._envs[number].step(own)
        self._begins[number] = bool(terminated or truncated)
        flags = TERMINATED if terminated else TRUNCATED if truncated else 0
        return Row(observation, np.asarray(reward).item(), flags, info)

    def _reset(self, number: int, seed: int | None) -> Row:
        self._begins[number] = False
        observation, info = self._envs[number].reset(seed=seed)
        return Row(observation, 0.0, RESET, info)

    def _stepped(self, rows: Sequence[Row]) -> Stepped:
        observation = self._observations.stacked([row.observation for row in rows])
        if self._mask is not None:
            anything = np.ones(self._mask.shape, np.int8)
            mask = np.stack([np.asarray(row.info.get(MASK, anything), np.int8) for row in rows])
            observation = _beside_mask(observation, mask)
        return Stepped(
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


def _made(make: MakeEnv, options: dict[str, Any]) -> Any:
    try:
        return make(**options)
    except TypeError as error:
        raise ConfigError(f"the environment cannot be made with env.options={options}: {error}") from error


def _mask_spec(info: dict[str, Any], spec: EnvSpec) -> ArraySpec | None:
    """Return the spec of the mask in info, if there is one and it is not in the observations already."""
    return ArraySpec(np.shape(info[MASK]), "int8") if MASK in info and spec.mask is None else None


def _with_mask(spec: EnvSpec, mask: ArraySpec) -> EnvSpec:
    return EnvSpec(_beside_mask(spec.observation, mask), spec.action)


def _beside_mask(tree: Any, mask: Any) -> Any:
    """Return a tree with one more leaf, in the order of names."""
    others = tree if isinstance(tree, dict) else {OBSERVATION: tree}
    return dict(sorted({**others, MASK: mask}.items()))
