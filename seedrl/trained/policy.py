"""A trained policy for one's own program: an action for every observation. `seedrl.load` makes it.

It sees what it saw in training: it keeps the newest frames, its last action and its core_state of every environment.
Knows nothing of environments but their spaces.
"""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from seedrl.device import choose_device
from seedrl.errors import ConfigError
from seedrl.run.finding import find_run
from seedrl.serving.seats import final_exploration
from seedrl.specs import Arrays, EnvSpec, as_tree, names, tree_map
from seedrl.trained.load import Trained, load_trained
from seedrl.trained.player import Chance, Player

if TYPE_CHECKING:
    from envs_server.spaces import ActionSpace, ObservationSpace


def load_policy(run: str | Path, checkpoint: str, greedy: bool, device: str, seed: int, env: Any) -> "TrainedPolicy":
    """Load the policy of a run; the arguments are those of `seedrl.load`."""
    place = choose_device(device)
    trained = load_trained(str(find_run(str(run), must_be_trained=True)), checkpoint)
    trained.policy.to(place)
    exploration = final_exploration(trained.config.exploration)
    chance = None if greedy else Chance(exploration, torch.Generator(place).manual_seed(seed))
    return TrainedPolicy(trained, chance, env)


class TrainedPolicy:
    """The policy of a run, which acts in one environment or in several at once. Owned by the thread that calls it."""

    def __init__(self, trained: Trained, chance: Chance | None, env: Any) -> None:
        self._trained = trained
        self._chance = chance
        self._spaces = Spaces(trained.spec, env)
        self._player: Player | None = None  # there is none until the number of environments is known
        self._begins = np.zeros(0, np.bool_)  # environments whose next observation begins an episode
        self._is_single = False
        self._has_warned = False

    @property
    def run(self) -> Path:
        """Return the run directory."""
        return self._trained.run_dir

    @property
    def env_id(self) -> str:
        """Return the id of the environment that the policy was trained on."""
        return self._trained.config.env.id

    @property
    def env_steps(self) -> int:
        """Return after how many environment steps the policy was saved."""
        return self._trained.env_steps

    def act(self, observation: Any, reward: Any = None) -> Any:
        """Return an action for the newest observation, or N actions for N observations.

        An observation of several environments has a leading axis [N, ...] in each of its arrays; then `reward` is [N],
        and so is each array of the actions. `reward` is what came with the observation. The first observation, and the
        first one after `reset`, begin an episode.
        """
        rows, count = self._spaces.rows(observation)
        self._prepare(count)
        assert self._player is not None
        self._warn_if_missing(reward)
        rewards = np.zeros(len(self._begins), np.float32) if reward is None else self._rewards(reward)
        action = self._player.act(rows, rewards, self._begins)
        self._begins = np.zeros_like(self._begins)
        return self._spaces.action(action, self._is_single)

    def reset(self, where: Any = None) -> None:
        """Let the next observation begin an episode: everywhere, or in some environments.

        `where` is a mask [N] or a list of their numbers. Without it everything is forgotten, also how many
        environments there were.
        """
        if where is None:
            self._player = None
        elif self._player is not None:
            chosen = np.zeros_like(self._begins)
            chosen[np.asarray(where) if np.size(where) else []] = True
            self._begins |= chosen

    def _prepare(self, count: int | None) -> None:
        """Begin if this is the first observation; refuse another number of environments after that."""
        rows = 1 if count is None else count
        if self._player is None:
            self._player, self._is_single = self._trained.player(rows, self._chance), count is None
            self._begins = np.ones(rows, np.bool_)
        if (rows, count is None) != (len(self._begins), self._is_single):
            before = "one environment" if self._is_single else f"{len(self._begins)} environments"
            now = "one" if count is None else str(count)
            raise ConfigError(f"the policy acts in {before}, and this is an observation of {now}; call reset() before")

    def _rewards(self, reward: Any) -> NDArray[np.float32]:
        rewards = np.asarray(reward, np.float32).reshape(-1)
        if len(rewards) != len(self._begins):
            raise ConfigError(f"{len(rewards)} rewards do not fit {len(self._begins)} observations")
        return rewards

    def _warn_if_missing(self, reward: Any) -> None:
        """Warn once: a recurrent policy was trained with rewards among its inputs."""
        if reward is None and not self._begins.all() and self._trained.policy.core_size and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "this policy has a recurrent state and has seen rewards in training; call act(observation, reward)",
                stacklevel=3,
            )


class Spaces:
    """Converts observations and actions between the user's form and trees of arrays [N, ...].

    Without an environment, an observation is flattened by its own dicts and tuples, and an action has the form of the
    spec. With one, its spaces decide, which matters for categories that do not count from 0 and for nested actions.
    """

    def __init__(self, spec: EnvSpec, env: Any) -> None:
        self._spec = spec
        self._observations: ObservationSpace | None = None
        self._actions: ActionSpace | None = None
        if env is not None:
            from envs_server import spaces  # with everything that an actor needs

            observation, action = _space(env, "observation_space"), _space(env, "action_space")
            if (found := spaces.spec_of(observation, action, str(env))) != spec:
                raise ConfigError(f"{env} has {found}, but the policy was trained on {spec}")
            self._observations, self._actions = spaces.ObservationSpace(observation), spaces.ActionSpace(action)

    def rows(self, observation: Any) -> tuple[Arrays, int | None]:
        """Return an observation as rows, and of how many environments it is; None for that of a single one."""
        found = dict(_leaves(observation))
        expected = dict(zip(names(self._spec.observation), self._spec.observations, strict=True))
        if found.keys() != expected.keys():
            raise ConfigError(f"the observation has {_listed(found)}; the policy was trained on {_listed(expected)}")
        counts = {_count(found[name], leaf.shape, name) for name, leaf in expected.items()}
        if len(counts) > 1:
            raise ConfigError(f"the parts of the observation are of different numbers of environments: {counts}")
        [count] = counts
        rows = 1 if count is None else count
        if self._observations is not None:
            return self._observations.rows(observation, rows), count
        arrays = [
            np.ascontiguousarray(found[name], leaf.dtype).reshape(rows, *leaf.shape) for name, leaf in expected.items()
        ]
        return as_tree(self._spec.observation, arrays), count

    def action(self, action: Arrays, is_single: bool) -> Any:
        """Return actions in the user's form: that of one environment, or rows."""
        taken = tree_map(lambda leaf: leaf[0], action) if is_single else action
        if self._actions is not None:
            return self._actions.nested(taken)
        return int(taken) if isinstance(taken, np.integer) else taken


def _space(env: Any, name: str) -> Any:
    """Return a space of an environment, or of each of a vector of them."""
    return getattr(env, f"single_{name}", None) or getattr(env, name)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the arrays of a nested value with their names, as seedrl/specs.py has them."""
    if isinstance(value, dict):
        children: Sequence[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, tuple):
        children = list(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    else:
        yield name, np.asarray(value)
        return
    for key, each in children:
        yield from _leaves(each, f"{name}/{key}" if name else str(key))


def _count(array: NDArray[Any], shape: tuple[int, ...], name: str) -> int | None:
    """Return how many environments an array is of; None for one without an axis for them."""
    if array.shape == shape:
        return None
    if array.shape[1:] == shape and array.ndim == len(shape) + 1:
        return len(array)
    where = f"observation {name}".rstrip()
    raise ConfigError(f"{where} has the shape {list(array.shape)}, but {list(shape)} or [N, …] is expected")


def _listed(tree: dict[str, Any]) -> str:
    return ", ".join(name or "one array" for name in tree)
