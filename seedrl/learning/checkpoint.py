"""Everything a run needs to go on, on disk: atomic, checked, free of pickle. Knows nothing of what the tensors mean.

A checkpoint is a directory named after its env steps, with .001 and so on for further ones of the same steps:

    tensors.safetensors   weights, optimiser state, generator state
    state.json            counters and other plain values
    manifest.json         sha256 of the two; written last

It is written under a temporary name, flushed to disk and renamed, so a name that parses is complete. Loading checks
the manifest, and falls back to the checkpoint before if anything does not match.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from seedrl.errors import RunDirectoryError

TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
Tensors = dict[str, Tensor]


class Checkpoint(NamedTuple):
    tensors: Tensors
    state: dict[str, Any]  # JSON


def save(directory: Path, env_steps: int, checkpoint: Checkpoint, keep: int) -> Path:
    """Writes a checkpoint below `directory` and removes all but the newest `keep`."""
    final = _free_name(directory, env_steps)
    temporary = directory / f".{final.name}"
    for interrupted in directory.glob(".[0-9]*"):
        shutil.rmtree(interrupted, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write(temporary / TENSORS, safetensors.torch.save(_apart(checkpoint.tensors)))
        _write(temporary / STATE, json.dumps(checkpoint.state).encode())
        digests = {name: _digest(temporary / name) for name in (TENSORS, STATE)}
        _write(temporary / MANIFEST, json.dumps(digests).encode())
        _sync(temporary)
        temporary.rename(final)
        _sync(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    others = [path for path in found(directory) if path != final]  # a damaged one may have a later name
    for old in others[: max(len(others) - keep + 1, 0)]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def found(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in directory.glob("[0-9]*") if path.is_dir())


def load_newest(directory: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is intact; None if there are none at all. Raises if all of them are damaged."""
    paths = found(directory)
    for path in reversed(paths):
        try:
            return load(path)
        except RunDirectoryError as error:
            warn(f"{error}; trying the one before")
    if paths:
        raise RunDirectoryError(f"every checkpoint in {directory} is damaged; choose another run_dir or delete them")
    return None


def load(path: Path) -> Checkpoint:
    """One checkpoint, after checking it against its manifest."""
    try:
        digests = json.loads((path / MANIFEST).read_bytes())
        for name in (TENSORS, STATE):
            if _digest(path / name) != digests[name]:
                raise RunDirectoryError(f"checkpoint {path} is damaged: {name} does not match its manifest")
        return Checkpoint(safetensors.torch.load_file(path / TENSORS), json.loads((path / STATE).read_bytes()))
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise RunDirectoryError(f"checkpoint {path} is damaged: {error}") from error


def pack_optimizer(optimizer: torch.optim.Optimizer) -> Tensors:
    """The per-parameter tensors of an optimiser's state; its settings come from the configuration."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{name}": torch.as_tensor(value)
        for index, values in state.items()
        for name, value in values.items()
        if value is not None
    }


def unpack_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors) -> None:
    state: dict[int, Tensors] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for parameter, values in optimizer.state.items():  # fused kernels expect the memory layout of the parameter
        for name, value in values.items():
            if value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def with_prefix(prefix: str, tensors: Tensors) -> Tensors:
    return {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Tensors) -> Tensors:
    start = f"{prefix}/"
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _free_name(directory: Path, env_steps: int) -> Path:
    """Named after the steps; a further one of the same steps sorts after those before and takes nobody's place."""
    name = f"{env_steps:012d}"
    same = sorted(directory.glob(f"{name}*"))
    return directory / (f"{name}.{int(same[-1].suffix[1:] or 0) + 1:03d}" if same else name)


def _apart(tensors: Tensors) -> Tensors:
    """Copies: safetensors refuses tensors that share memory, as tied weights do, or are not contiguous."""
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
