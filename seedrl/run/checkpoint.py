"""The files of a checkpoint: written atomically, checked, free of pickle.

Knows nothing of what the tensors mean (snapshot.py) or of when they are saved and how long they are kept (saving.py).
A checkpoint is a directory named after its env steps, with .001 and so on for further ones of the same steps:

    tensors.safetensors   weights, optimizer state, generator state
    state.json            counters and other plain values; `score`, if there is one, is higher for better policies
    store.safetensors     the unrolls of a replay memory, if they are saved; only the newest checkpoint has them
    manifest.json         sha256 of the others; written last

It is written under a temporary name, flushed to disk, read back and renamed, so a name that parses is complete. It is
renamed again before it is deleted. Loading checks the manifest, and falls back to the checkpoint before if anything
does not match. A checkpoint that cannot be used is set aside: it is renamed to damaged.000000001234, for example,
which only people look for.
"""

import contextlib
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

TENSORS, STATE, STORE, MANIFEST = "tensors.safetensors", "state.json", "store.safetensors", "manifest.json"
Tensors = dict[str, Tensor]


class Checkpoint(NamedTuple):
    tensors: Tensors
    state: dict[str, Any]  # JSON
    store: Tensors | None = None  # the unrolls of a replay memory; None if they are not saved, or not wanted


def write(directory: Path, env_steps: int, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint below `directory`, read it back, and only then give it its name."""
    final = _free_name(directory, env_steps)
    for interrupted in directory.glob(".[0-9]*"):
        shutil.rmtree(interrupted, ignore_errors=True)
    temporary = directory / f".{final.name}"
    temporary.mkdir(parents=True)
    try:
        _write_files(temporary, checkpoint)
        _check_digests(temporary, with_store=True)
        temporary.rename(final)
        _sync(directory)
        for other in found(directory):
            if other != final:
                (other / STORE).unlink(missing_ok=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def found(directory: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return sorted(path for path in directory.glob("[0-9]*") if path.is_dir())


def load_newest(directory: Path, warn: Callable[[str], None], is_ours: bool = False) -> Checkpoint | None:
    """Return the newest checkpoint that is intact; None if there are none at all. Raise if all of them are damaged.

    There is a warning for each damaged one that is newer; they are set aside if the directory `is_ours` to change. Only
    then is the checkpoint loaded to resume the run, with the unrolls of its replay memory.
    """
    paths = found(directory)
    for number, path in enumerate(reversed(paths)):
        try:
            checkpoint = load(path, with_store=is_ours)
        except RunDirectoryError as error:
            warn(f"{error}; trying the one before")
            continue
        for damaged in paths[len(paths) - number :] if is_ours else ():
            set_aside(damaged, "damaged")
        return checkpoint
    if paths:
        raise RunDirectoryError(f"every checkpoint in {directory} is damaged; choose another run_dir or delete them")
    return None


def set_aside(path: Path, why: str) -> Path:
    """Move a checkpoint out of the way without losing it; return its new path."""
    target = path.with_name(f"{why}.{path.name}")
    shutil.rmtree(target, ignore_errors=True)
    return path.rename(target)


def remove(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, because one that is half deleted must not look complete."""
    renamed = path.with_name(f".{path.name}")
    with contextlib.suppress(OSError):
        shutil.rmtree(path.rename(renamed), ignore_errors=True)


def score_of(path: Path) -> float | None:
    """Return the score in the state of a checkpoint; None if it has none or cannot be read."""
    try:
        score = json.loads((path / STATE).read_bytes()).get("score")
    except (OSError, ValueError, AttributeError):
        return None
    return score if isinstance(score, int | float) else None


def load(path: Path, with_store: bool = False) -> Checkpoint:
    """Read a checkpoint after checking it against its manifest."""
    try:
        _check_digests(path, with_store)
        tensors, state = safetensors.torch.load_file(path / TENSORS), json.loads((path / STATE).read_bytes())
        has_store = with_store and (path / STORE).exists()
        return Checkpoint(tensors, state, safetensors.torch.load_file(path / STORE) if has_store else None)
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise RunDirectoryError(f"checkpoint {path} is damaged: {error}") from error


def pack_optimizer(optimizer: torch.optim.Optimizer) -> Tensors:
    """Return the tensors that an optimizer keeps of each parameter; its settings come from the configuration."""
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
    """Return a path named after the steps; a further one of the same steps sorts after those that are there."""
    name = f"{env_steps:012d}"
    same = sorted(directory.glob(f"{name}*"))
    return directory / (f"{name}.{int(same[-1].suffix[1:] or 0) + 1:03d}" if same else name)


def _write_files(path: Path, checkpoint: Checkpoint) -> None:
    contents = {
        TENSORS: safetensors.torch.save(_apart(checkpoint.tensors)),
        STATE: json.dumps(checkpoint.state).encode(),
    }
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    for name, content in contents.items():
        _write(path / name, content)
    if checkpoint.store is not None:
        safetensors.torch.save_file(checkpoint.store, path / STORE)
        (path / STORE).chmod((path / TENSORS).stat().st_mode)  # safetensors lets only its owner read it
        _sync(path / STORE)
        digests[STORE] = _digest(path / STORE)
    _write(path / MANIFEST, json.dumps(digests).encode())
    _sync(path)


def _check_digests(path: Path, with_store: bool) -> None:
    """Raise RunDirectoryError, or the error of reading, if the files are not those that were meant to be written."""
    digests = json.loads((path / MANIFEST).read_bytes())
    for name in (TENSORS, STATE, *([STORE] if with_store and (path / STORE).exists() else [])):
        if _digest(path / name) != digests[name]:
            raise RunDirectoryError(f"checkpoint {path} is damaged: {name} does not match its manifest")


def _apart(tensors: Tensors) -> Tensors:
    """Copy the tensors: safetensors refuses those that share memory, as tied weights do, or are not contiguous."""
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
