"""How much memory a learner is going to need on its device, told before it is taken. Knows nothing of who uses it."""

from typing import NamedTuple

import torch
from torch import nn

from seedrl.algorithms.settings import AlgorithmConfig, Optimizer
from seedrl.config import LearnerConfig
from seedrl.device import free_bytes
from seedrl.errors import ConfigError, Mismatch
from seedrl.specs import EnvSpec
from seedrl.store import Store, StoreSizes

COPIES = 3  # of the weights: the one that is trained and the two that serve by turns
MIB = 2**20


class Budget(NamedTuple):
    """Bytes on the device. What a forward or backward pass takes for a moment is not in it."""

    store: int
    weights: int  # all copies
    optimizer: int  # gradients included

    @property
    def total(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {bytes_ / MIB:,.1f}" for name, bytes_ in self._asdict().items())
        return f"{self.total / MIB:,.1f} MiB ({parts})"


def budget_of(config: LearnerConfig, spec: EnvSpec, model: nn.Module, core_size: int) -> Budget:
    parameters = sum(each.nbytes for each in model.parameters())
    weights = parameters + sum(each.nbytes for each in model.buffers())
    return Budget(
        store=Store.bytes_needed(spec, StoreSizes.of(config, core_size)),
        weights=COPIES * weights,
        optimizer=(1 + _averages(config.algorithm)) * parameters,
    )


def _averages(algorithm: AlgorithmConfig) -> int:
    """Numbers the optimiser keeps of every parameter."""
    return 2 if algorithm.optimizer is Optimizer.adam or algorithm.rmsprop_momentum else 1


def check_budget(budget: Budget, device: torch.device) -> None:
    """Refuses to begin what does not fit."""
    free = free_bytes(device)
    if free is not None and budget.total > free:
        raise ConfigError(
            f"the learner needs {budget} on {device} and {free / MIB:,.0f} MiB are free; lower serving.max_slots, "
            "store.capacity or algorithm.unroll_length, or take a smaller model"
        )


def check_store(config: LearnerConfig, device: torch.device, spec: EnvSpec) -> None:
    """Refuses an actor's spaces if the store alone would not fit."""
    sizes = StoreSizes.of(config, core_size=max(2 * config.model.lstm, config.model.gru))
    needed = Store.bytes_needed(spec, sizes)
    free = free_bytes(device)
    if free is not None and needed > free:
        raise Mismatch(
            f"spaces: the store for {spec} needs {needed / MIB:,.0f} MiB and {free / MIB:,.0f} MiB are free; "
            "lower serving.max_slots, store.capacity or algorithm.unroll_length on the learner"
        )
