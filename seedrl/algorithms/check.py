"""Compares an algorithm and its loss with the protocol in base.py. Knows nothing of training loops."""

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms.auxiliary import whole_loss
from seedrl.algorithms.base import Algorithm, Loss
from seedrl.errors import ConfigError
from seedrl.models.base import core_size_of
from seedrl.models.check import sample_input
from seedrl.specs import EnvSpec
from seedrl.types import Ticket, Unrolls

METHODS = ("batches", "valid", "loss", "stepped", "tensors", "load")
NAME = re.compile(r"[a-z0-9_]+")


def check_members(algorithm: Any, setting: str) -> None:
    """Raise ConfigError if an algorithm lacks something that the learner needs."""
    missing = [name for name in METHODS if not callable(getattr(algorithm, name, None))]
    if not isinstance(getattr(algorithm, "overlap", None), int):
        missing.append("overlap")
    if missing:
        raise ConfigError(f"{setting} has no {', '.join(missing)}; seedrl/algorithms/base.py explains each")


def check_loss(loss: Any, setting: str) -> None:
    """Raise ConfigError if a loss is not a scalar that gradients can follow from, or its report is no numbers."""
    if not isinstance(loss, Loss):
        raise ConfigError(f"{setting}: loss must return a Loss(total, report), returned {type(loss).__name__}")
    if not isinstance(loss.total, Tensor) or loss.total.dim():
        raise ConfigError(f"{setting}: expected Loss.total to be a scalar, shape [], saw {_brief(loss.total)}")
    if not loss.total.requires_grad:
        raise ConfigError(f"{setting}: Loss.total has no gradient; it must follow from what `forward` returns")
    for name, value in loss.report.items():
        if not NAME.fullmatch(name) or not isinstance(value, Tensor) or value.dim():
            raise ConfigError(
                f"{setting}: expected Loss.report to hold scalars by names of [a-z0-9_], saw {name!r}: {_brief(value)}"
            )


def sample_unrolls(spec: EnvSpec, actions: Actions, model: nn.Module, length: int, batch: int) -> Unrolls:
    """Return a train batch of random rows that this model has answered; `spec` has its frames stacked."""
    device = next(model.parameters()).device
    inputs = sample_input(spec, length + 1, batch, device)
    core_state = torch.zeros(batch, core_size_of(model), device=device)
    with torch.no_grad():
        output, _ = model(inputs, core_state)
    noise = actions.noise(inputs.reward.numel(), torch.Generator(device).manual_seed(1))
    return Unrolls(
        inputs._replace(reward=torch.linspace(0, 1, inputs.reward.numel(), device=device).view_as(inputs.reward)),
        terminated=torch.zeros_like(inputs.reset),
        truncated=torch.zeros_like(inputs.reset),
        action=actions.choose(output.logits, noise.view(length + 1, batch, -1)),
        behavior_logits=output.logits,
        behavior_value=output.value,
        core_state=core_state,
        weight=torch.ones(batch, device=device),
        policy_version=np.zeros((length + 1, batch), np.int64),
        ticket=Ticket(np.arange(batch), np.zeros(batch, np.int64)),
    )


def first_loss(algorithm: Algorithm, unrolls: Unrolls, model: nn.Module, setting: str) -> Loss:
    """Return the checked loss of the first gradient step on a train batch, after its backward pass."""
    for batch in algorithm.batches(unrolls):
        loss = whole_loss(algorithm, batch, model, 0.0)
        check_loss(loss, setting)
        loss.total.backward()
        return loss
    raise ConfigError(f"{setting}: batches must yield at least one batch, yielded none")


def _brief(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
