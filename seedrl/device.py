"""The device that serves and trains: which one it is, how arrays get there, and in which order it does what.

An accelerator works on *streams*: what is launched on one happens in order, and two of them know nothing of each other.
Serving has one of high priority, so that actions do not queue behind an update, and learning another one, on which
everything that is trained is also built. The host runs ahead of both. On the CPU there is nothing to order.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seedrl.errors import ConfigError

ACCELERATORS = ["cuda"]  # kinds with streams, pinned memory and float64; ROCm has the same name
HIGH = -1  # priority of a stream
ALIGNMENT = 16  # bytes, of arrays that are copied together

# Observations are used where gRPC put them, in memory that must not be written to, and nothing here writes to it.
# torch warns of such memory once in a process: now.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


def choose_device(wanted: str, local_rank: int = 0) -> torch.device:
    """Return the device that the settings name, and make it this thread's; ranks of a machine have different ones.

    `wanted` is auto, cpu, or a kind of accelerator, with a number if it is not to follow from the rank.
    """
    kind, colon, number = wanted.partition(":")
    is_known = kind in ACCELERATORS or wanted in ("auto", "cpu")
    if not is_known or (colon and not number.isdecimal()):
        raise ConfigError(f"device={wanted!r} is none of auto, cpu, {', '.join(ACCELERATORS)}, cuda:NUMBER")
    if kind == "auto":
        kind = next((each for each in ACCELERATORS if torch.get_device_module(each).is_available()), "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, _number(wanted, kind, number, local_rank))
    torch.get_device_module(device).set_device(device)
    return device


def _number(wanted: str, kind: str, number: str, local_rank: int) -> int:
    module = torch.get_device_module(kind)
    if not module.is_available():
        raise ConfigError(f"device={wanted}, but torch sees no {kind.upper()} device here; set device=cpu")
    count: int = module.device_count()
    if number and int(number) >= count:
        raise ConfigError(f"device={wanted}, but torch sees only {count} of them here, from {kind}:0")
    if not number and local_rank >= count > 1:
        raise ConfigError(
            f"rank {local_rank} of this machine would share a device with another, for torch sees only {count} of them"
            f" here, and NCCL refuses that; start {count} ranks on each machine at most, or set device=cpu"
        )
    return int(number) if number else local_rank % count  # an engine may show each rank only its own


def is_accelerator(device: torch.device) -> bool:
    """Return whether the device has a memory and streams of its own."""
    return device.type not in ("cpu", "meta")


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on the device; on the CPU it shares the memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if is_accelerator(device) else tensor


class Streams(NamedTuple):
    serving: Any
    learning: Any


@cache
def _streams(device: torch.device) -> Streams:
    """Return the streams of a device, which are made once in a process."""
    module = torch.get_device_module(device)
    return Streams(module.Stream(device, priority=HIGH), module.Stream(device))


@contextmanager
def serving_stream(device: torch.device) -> Iterator[None]:
    """Let this thread use the device for serving; it is finished at the end."""
    if is_accelerator(device):
        with torch.get_device_module(device).stream(_streams(device).serving):
            yield
            finish(device)
    else:
        yield


@contextmanager
def learning_stream(device: torch.device) -> Iterator[None]:
    """Let this thread use the device for learning, or to build what learns; it is finished at the end."""
    if is_accelerator(device):
        with torch.get_device_module(device).stream(_streams(device).learning):
            yield
            finish(device)
    else:
        yield


def after_serving(device: torch.device) -> None:
    """Order the work that this thread launches from now on after everything that serving has launched so far."""
    if is_accelerator(device):
        torch.get_device_module(device).current_stream(device).wait_stream(_streams(device).serving)


def finish(device: torch.device) -> None:
    """Wait until the device has finished the work of this thread."""
    if is_accelerator(device):
        torch.get_device_module(device).current_stream(device).synchronize()


class Staging:
    """Moves several arrays to the device in one copy. Owned by one thread.

    They are packed into one buffer of pinned memory, which is kept: pinning takes longer than copying. On the CPU
    nothing is copied that need not be.
    """

    def __init__(self, device: torch.device, room: int = 0) -> None:
        """With `room` bytes arrays always go to the same memory of the device, and replace those before."""
        self._device = device
        self._room = torch.empty(room, dtype=torch.uint8, device=device) if room else None
        self._is_copying = is_accelerator(device)
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._copied = torch.get_device_module(device).Event() if self._is_copying else None

    def upload(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Return the arrays as tensors on the device; on the CPU they share the memory."""
        if not self._is_copying:
            return [torch.from_numpy(array) for array in arrays]
        return self.upload_joined([[array] for array in arrays])

    def upload_joined(self, columns: Sequence[Sequence[NDArray[Any]]]) -> list[Tensor]:
        """Return one tensor on the device for each column, whose parts [n, ...] are joined."""
        if not self._is_copying:
            return [torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts)) for parts in columns]
        starts = _starts(columns)
        buffer = self._free_buffer(int(starts[-1]))
        for start, parts in zip(starts, columns, strict=False):
            at = int(start)
            for part in parts:
                buffer[at : at + part.nbytes] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
                at += part.nbytes
        there = self._copy(int(starts[-1]))
        assert self._copied is not None
        self._copied.record(torch.get_device_module(self._device).current_stream(self._device))
        return [_view(there, int(start), parts) for start, parts in zip(starts, columns, strict=False)]

    def _copy(self, nbytes: int) -> Tensor:
        """Copy the beginning of the buffer to the device."""
        if self._room is None:
            return self._buffer[:nbytes].to(self._device, non_blocking=True)
        assert nbytes <= len(self._room)
        return self._room[:nbytes].copy_(self._buffer[:nbytes], non_blocking=True)

    def _free_buffer(self, nbytes: int) -> NDArray[np.uint8]:
        """Return pinned memory of at least this size from which nothing is being copied any more."""
        assert self._copied is not None
        self._copied.query() or self._copied.synchronize()
        if len(self._buffer) < nbytes:
            self._buffer = torch.empty(2 * nbytes, dtype=torch.uint8).pin_memory()
        return self._buffer.numpy()


def packed_bytes(columns: Sequence[Sequence[NDArray[Any]]]) -> int:
    """Return the bytes that `Staging.upload_joined` copies."""
    return int(_starts(columns)[-1])


def _starts(columns: Sequence[Sequence[NDArray[Any]]]) -> NDArray[np.int64]:
    """Return where each column begins in a buffer, and where the last one ends."""
    return np.cumsum([0, *(_aligned(sum(part.nbytes for part in parts)) for parts in columns)])


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _view(there: Tensor, start: int, parts: Sequence[NDArray[Any]]) -> Tensor:
    """Return the part of a copied buffer that holds these arrays."""
    rows, nbytes = sum(len(part) for part in parts), sum(part.nbytes for part in parts)
    dtype = torch.from_numpy(np.empty(0, parts[0].dtype)).dtype
    return there[start : start + nbytes].view(dtype).view(rows, *parts[0].shape[1:])


class Download:
    """Copies a tensor to the host while the device works on. Owned by one thread; holds one copy at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copied = torch.get_device_module(device).Event() if is_accelerator(device) else None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._copy = self._buffer

    def begin(self, tensor: Tensor) -> None:
        """Copy a tensor as soon as it is computed."""
        if self._copied is None:
            self._copy = tensor
            return
        if len(self._buffer) < tensor.nbytes:
            self._buffer = torch.empty(2 * tensor.nbytes, dtype=torch.uint8).pin_memory()
        self._copy = self._buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._copy.copy_(tensor, non_blocking=True)
        self._copied.record(torch.get_device_module(self._device).current_stream(self._device))

    def is_ready(self) -> bool:
        """Return whether `wait` would return at once."""
        return self._copied is None or bool(self._copied.query())

    def wait(self) -> NDArray[Any]:
        """Return the copy; it is overwritten by the next one."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copy.numpy()
