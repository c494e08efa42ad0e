"""Auxiliary losses: what a model returns in `ModelOutput.aux` is minimised besides the loss of any algorithm.

The model has weighted them. One of [T+1, B] (or of whatever rows the algorithm passes forward) is averaged over the
valid transitions, each of which counts with the row that it begins at; one of [] is taken as it is. Knows nothing of
what they are about, and algorithms know nothing of them.
"""

import torch
from torch import Tensor

from seedrl.algorithms.base import Algorithm, Batch, Forward, Loss
from seedrl.errors import ConfigError
from seedrl.types import ModelInput, ModelOutput

PREFIX = "aux_"  # of their names in the report


class NotingForward:
    """A model that notes the auxiliary losses of its newest forward pass with gradients."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.aux: dict[str, Tensor] = {}

    def __call__(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        output, core_state = self._forward(inputs, core_state)
        if output.aux and torch.is_grad_enabled():
            self.aux = output.aux
        return output, core_state


def whole_loss(algorithm: Algorithm, batch: Batch, forward: Forward, fraction: float) -> Loss:
    """Return the loss of an algorithm with the auxiliary losses of the model added and reported as `aux_NAME`."""
    noting = NotingForward(forward)
    loss = algorithm.loss(batch, noting, fraction)
    if not noting.aux:
        return loss
    valid = algorithm.valid(batch)
    aux = {f"{PREFIX}{name}": _mean(name, values, valid) for name, values in noting.aux.items()}
    total = loss.total + torch.stack(list(aux.values())).sum()
    return loss._replace(total=total, report={**loss.report, **{name: mean.detach() for name, mean in aux.items()}})


def _mean(name: str, values: Tensor, valid: Tensor) -> Tensor:
    if not values.dim():
        return values
    begins = values[: len(valid)]  # no transition begins at the last row of an unroll
    if begins.shape != valid.shape:
        raise ConfigError(
            f"the model's auxiliary loss {name!r} has shape {list(values.shape)}; it must be a scalar, "
            f"or have a number per row like `value`, here {list(valid.shape)} transitions"
        )
    return (valid * begins).sum() / valid.sum().clamp(min=1)
