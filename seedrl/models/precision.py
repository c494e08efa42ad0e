"""The numbers that convolutional networks compute with: 32 bits, or bfloat16, twice as fast where the device has it.

Only networks for images are lowered: they are nearly all of the work. Weights, heads, targets, losses and everything
that is recorded keep 32 bits. Serving and training lower alike, so that the policy that acted is the one trained on.

Some processors announce bfloat16 and end with an illegal instruction. A process of its own tries it first.
"""

import subprocess
import sys
from functools import cache

import torch
from torch import nn

from seedrl.config import Precision
from seedrl.errors import ConfigError
from seedrl.models.images import ImageEncoder

TRIAL_SECONDS = 60.0  # importing torch takes most of it
_TRIAL = """
import torch
layer = torch.nn.Conv2d(4, 16, 8, 4).to(memory_format=torch.channels_last)
pixels = torch.rand(2, 4, 84, 84).contiguous(memory_format=torch.channels_last)
with torch.autocast("cpu", torch.bfloat16):
    features = torch.nn.Linear(6400, 8)(layer(pixels).flatten(1))
features.float().sum().backward()
"""


def lower(model: nn.Module, wanted: Precision, device: torch.device) -> None:
    """Let the networks for images of a model compute in bfloat16, if that is wanted and works on the device.

    Raises ConfigError if it cannot be done although it was asked for by name.
    """
    encoders = [module for module in model.modules() if isinstance(module, ImageEncoder)]
    if wanted is Precision.bf16 and not encoders:
        raise ConfigError("model.precision=bf16 is for the networks nature and impala; set it to fp32")
    if wanted is Precision.fp32 or not encoders:
        return
    works = _works_on_accelerator(device) if device.type != "cpu" else _works_on_cpu()
    if not works and wanted is Precision.bf16:
        raise ConfigError(f"model.precision=bf16 does not work on the {device.type} of this machine; set it to auto")
    for encoder in encoders:
        encoder.is_low = works


def is_low(model: nn.Module) -> bool:
    """Tell whether a network of the model computes in bfloat16."""
    return any(isinstance(module, ImageEncoder) and module.is_low for module in model.modules())


def replica_weights(model: nn.Module) -> None:
    """Keep the weights of lowered layers in bfloat16, which is what their inputs meet in any case: for serving only."""
    for encoder in model.modules():
        if isinstance(encoder, ImageEncoder) and encoder.is_low:
            for layer in encoder.modules():
                if isinstance(layer, (nn.Conv2d, nn.Linear)):
                    layer.to(torch.bfloat16)


def _works_on_accelerator(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


@cache
def _works_on_cpu() -> bool:
    """Tell whether this processor computes in bfloat16 by itself, and survives it."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    try:
        trial = subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True, timeout=TRIAL_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return trial.returncode == 0
