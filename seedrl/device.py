"""The device that serves and trains: which one it is, and how arrays get there."""

import contextlib
import warnings
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seedrl.config import Device
from seedrl.errors import ConfigError

# Observations are used where gRPC put them, in memory that must not be written to, and nothing here writes to it.
# torch warns of such memory once in a process: now.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


def choose_device(wanted: Device, local_rank: int = 0) -> torch.device:
    """Return the device of a process; each rank of a machine has an accelerator of its own."""
    if wanted is Device.cpu or (wanted is Device.auto and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device=cuda, but torch sees no CUDA device here; set device=cpu")
    if not local_rank:
        return torch.device("cuda")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())  # an engine may show each rank only its own
    torch.cuda.set_device(device)
    return device


def is_accelerator(device: torch.device) -> bool:
    """Return whether the device has a memory and streams of its own."""
    return device.type != "cpu"


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on the device; on the CPU it shares the memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if is_accelerator(device) else tensor


# On CUDA the learner works in a stream of its own, so that actions do not queue behind an update. These three keep the
# two streams in order; on the CPU there is nothing to order.


def own_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context whose work waits for no other stream, and no other stream for it."""
    if not is_accelerator(device):
        return contextlib.nullcontext()
    module = torch.get_device_module(device)
    stream: contextlib.AbstractContextManager[Any] = module.stream(module.Stream(device))
    return stream


def after_serving(device: torch.device) -> None:
    """Order the work that this thread launches from now on after everything that serving has launched so far."""
    if is_accelerator(device):
        module = torch.get_device_module(device)
        module.current_stream(device).wait_stream(module.default_stream(device))


def finish(device: torch.device) -> None:
    """Wait until the device has finished the work of this thread."""
    if is_accelerator(device):
        torch.get_device_module(device).current_stream(device).synchronize()
