"""From `algorithm.*` settings to an algorithm. The one place that knows the built-in ones by name."""

from collections.abc import Callable

from torch import nn

from seedrl import plugins
from seedrl.actions import Actions
from seedrl.algorithms.base import Algorithm
from seedrl.algorithms.bc import BC
from seedrl.algorithms.check import check_members
from seedrl.algorithms.dqn import DQN
from seedrl.algorithms.ppo import PPO
from seedrl.algorithms.pqn import PQN
from seedrl.algorithms.sac import SAC
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.algorithms.vtrace import VTrace
from seedrl.errors import ConfigError

BUILT_IN: dict[str, Callable[[AlgorithmConfig, Actions, nn.Module], Algorithm]] = {
    "ppo": PPO,
    "vtrace": VTrace,
    "pqn": PQN,
    "dqn": DQN,
    "sac": SAC,
    "bc": BC,
}


def build_algorithm(config: AlgorithmConfig, actions: Actions, model: nn.Module) -> Algorithm:
    """Return the algorithm that the settings name, for this model; nothing in them is open any more."""
    if plugins.is_import_path(config.name):
        algorithm: Algorithm = plugins.build("algorithm.name", config.name, config, actions, model, **config.options)
        check_members(algorithm, f"algorithm.name={config.name}")
        return algorithm
    if config.name not in BUILT_IN:
        raise ConfigError(f"algorithm.name={config.name!r} is not one of {', '.join(BUILT_IN)} or your.module:Class")
    return BUILT_IN[config.name](config, actions, model)
