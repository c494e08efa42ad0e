"""The memory that a learner or a policy server needs on its device, counted before it is taken.

Knows nothing of what the memory is used for afterwards.
"""

from typing import NamedTuple

import torch
from torch import nn

from seedrl.algorithms.base import Algorithm, networks_of
from seedrl.algorithms.settings import AlgorithmConfig, Optimizer
from seedrl.bank import SPARE
from seedrl.config import LearnerConfig, StoreDevice
from seedrl.device import is_accelerator
from seedrl.errors import ConfigError, Mismatch
from seedrl.models.base import core_size_of
from seedrl.run.host_memory import free_host_bytes
from seedrl.sizes import has_league
from seedrl.specs import EnvSpec
from seedrl.store import Store, StoreSizes

COPIES = 3  # of the weights: the one that is trained and the two that serve by turns
MIB = 2**20
HOST = torch.device("cpu")


class Budget(NamedTuple):
    """Bytes, without what a forward or backward pass takes for a moment. All are on the device but `host`."""

    store: int
    weights: int  # all copies, those of the bank, and what the algorithm has besides, such as critics
    optimizer: int  # gradients included
    host: int = 0  # the columns of the store that are on the host, whatever the device is; all with store.device=host

    @property
    def total(self) -> int:
        return sum(self)

    def on(self, device: torch.device) -> int:
        """Return what has to fit the device."""
        return self.total if device.type == "cpu" else self.total - self.host

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {bytes_ / MIB:,.1f}" for name, bytes_ in self._asdict().items())
        return f"{self.total / MIB:,.1f} MiB ({parts})"


def budget_of(config: LearnerConfig, spec: EnvSpec, model: nn.Module, algorithm: Algorithm) -> Budget:
    """Return what serving and training a model takes, and what the algorithm has besides it."""
    sizes = StoreSizes.of(config, core_size_of(model), algorithm.overlap)
    serving, networks = serving_budget(spec, model, sizes), networks_of(algorithm)
    own = _weight_bytes(networks) + _state_bytes(algorithm) + bank_copies(config) * _weight_bytes(model)
    own += _weight_bytes(model) if config.teacher else 0
    trained = _parameter_bytes(model) + _parameter_bytes(networks)
    optimizer = (1 + _averages(config.algorithm)) * trained
    return _placed(serving._replace(weights=serving.weights + own, optimizer=optimizer), config)


def bank_copies(config: LearnerConfig) -> int:
    """Return how many policies the bank may hold besides the one that is trained."""
    league = config.league
    snapshots = 1 + league.snapshots + SPARE if league.snapshot_updates else 1  # one is what snapshots are copied from
    return snapshots + len(league.opponents) if has_league(config) else 0


def _placed(budget: Budget, config: LearnerConfig) -> Budget:
    """Return the budget with the store where the settings put it."""
    if config.store.device is StoreDevice.auto:
        return budget
    return budget._replace(store=0, host=budget.store + budget.host)


def serving_budget(spec: EnvSpec, model: nn.Module, sizes: StoreSizes) -> Budget:
    """Return what serving a model takes if nothing is trained. `sizes` are those of the store."""
    store = Store.bytes_needed(spec, sizes)
    return Budget(store.device, COPIES * _weight_bytes(model), optimizer=0, host=store.host)


def checkpoint_bytes(config: LearnerConfig, model: nn.Module, algorithm: Algorithm) -> int:
    """Return the size of one checkpoint: the weights, what the optimizer keeps of them, and what the algorithm has."""
    trained = nn.ModuleList([model, networks_of(algorithm)])
    averages = _averages(config.algorithm) * _parameter_bytes(trained)
    snapshots = config.league.snapshots + SPARE if has_league(config) and config.league.snapshot_updates else 0
    return _weight_bytes(trained) + averages + _state_bytes(algorithm) + snapshots * _weight_bytes(model)


def saved_unrolls(config: LearnerConfig, spec: EnvSpec, sizes: StoreSizes) -> int:
    """Return the size of the unrolls in a checkpoint, once the store is full; 0 if they are not saved."""
    return sum(Store.bytes_needed(spec, sizes._replace(slots=0))) if config.store.checkpoint else 0


def _state_bytes(algorithm: Algorithm) -> int:
    return sum(tensor.nbytes for tensor in algorithm.tensors().values())


def _weight_bytes(model: nn.Module) -> int:
    return _parameter_bytes(model) + sum(each.nbytes for each in model.buffers())


def _parameter_bytes(model: nn.Module) -> int:
    return sum(each.nbytes for each in model.parameters())


def _averages(algorithm: AlgorithmConfig) -> int:
    """Return how many numbers the optimizer keeps of every parameter."""
    return 2 if algorithm.optimizer is Optimizer.adam or algorithm.rmsprop_momentum else 1


def free_bytes(device: torch.device) -> int | None:
    """Return what can be allocated on the device; None where the system does not tell."""
    if not is_accelerator(device):
        return free_host_bytes()
    return int(torch.get_device_module(device).mem_get_info(device)[0])


def check_budget(budget: Budget, device: torch.device) -> None:
    """Raise ConfigError if the budget does not fit the device, or the host of an accelerator."""
    for where, needed in ((device, budget.on(device)), (HOST, budget.host)):
        free = free_bytes(where)
        if free is not None and needed > free:
            raise ConfigError(
                f"the learner needs {budget}, {needed / MIB:,.1f} of them on {where}, where {free / MIB:,.0f} MiB are "
                "free; lower serving.max_slots, store.capacity or algorithm.unroll_length, choose a smaller model, or "
                "set store.device=host if an accelerator is too small for the store"
            )


def check_store(config: LearnerConfig, device: torch.device, spec: EnvSpec) -> None:
    """Raise Mismatch if the store for an actor's spaces alone would not fit the device."""
    sizes = StoreSizes.of(config, core_size=max(2 * config.model.lstm, config.model.gru))
    needed = Store.bytes_needed(spec, sizes)
    try:
        check_budget(_placed(Budget(needed.device, weights=0, optimizer=0, host=needed.host), config), device)
    except ConfigError as error:
        raise Mismatch(f"spaces: the store for {spec} does not fit: {error}") from error
