"""The forward pass of a network, compiled by torch.compile for training. Knows nothing of losses or serving.

A module is compiled in place, so that the names in its checkpoints stay what they are. Its copies are not compiled: the
replicas that serve, target networks and snapshots run as they are written. Serving gains nothing from it that graphs do
not give it already, and it would stand still whenever torch compiled for another number of rows.
"""

import torch
from torch import Tensor, nn

from seedrl.errors import ConfigError


def compile_forward(model: nn.Module) -> None:
    """Let torch compile the forward pass when it is first run, and for each kind of train batch.

    Raises ConfigError if torch has nothing here to compile with.
    """
    device = next(model.parameters()).device
    try:
        torch.compile(_doubled)(torch.ones(1, device=device))
    except RuntimeError as error:
        raise ConfigError(
            f"compile=true: torch cannot compile for {device} on this machine ({str(error).strip().splitlines()[0]}); "
            "it needs a C++ compiler for the CPU, and Triton as well for CUDA; install that, or set compile=false"
        ) from error
    model.compile()


def _doubled(numbers: Tensor) -> Tensor:
    return 2 * numbers
