"""Everything a run needs to go on, on disk: atomic, checked, free of pickle. Knows nothing of what the tensors mean.

A checkpoint is a directory named after its env steps, with .001 and so on for further ones of the same steps:

    tensors.safetensors   weights, optimiser state, generator state
    state.json            counters and other plain values; `score`, if there is one, says how good it is
    manifest.json         sha256 of the two; written last

It is written under a temporary name, flushed to disk, read back and renamed, so a name that parses is complete; only
then do older ones go, and those are renamed before they are deleted. Loading checks the manifest, and falls back to the
checkpoint before if anything does not match. One that turns out to be of no use is set aside: renamed to
damaged.000000001234, say, where nobody looks for it but people.
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

TENSORS, STATE, MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
Tensors = dict[str, Tensor]


class Checkpoint(NamedTuple):
    tensors: Tensors
    state: dict[str, Any]  # JSON


def save(
    directory: Path, env_steps: int, checkpoint: Checkpoint, keep: int, best: bool = False, milestones: int = 0
) -> Path:
    """Writes a checkpoint below `directory`, checks it, and only then removes what is not worth keeping.

    That is all but the newest `keep`, the one with the highest score if `best`, and the first one after every
    `milestones` env steps unless that is 0.
    """
    final = _free_name(directory, env_steps)
    for interrupted in directory.glob(".[0-9]*"):
        shutil.rmtree(interrupted, ignore_errors=True)
    temporary = directory / f".{final.name}"
    temporary.mkdir(parents=True)
    try:
        _write_files(temporary, checkpoint)
        _check_digests(temporary)
        temporary.rename(final)
        _sync(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    others = [path for path in found(directory) if path != final]  # one from before a fallback may have a later name
    wanted = {*others[max(len(others) - keep + 1, 0) :], *(_best([*others, final]) if best else ())}
    for old in set(others) - wanted - _milestones(others, milestones):
        _remove(old)
    return final


def found(directory: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in directory.glob("[0-9]*") if path.is_dir())


def load_newest(directory: Path, warn: Callable[[str], None], is_ours: bool = False) -> Checkpoint | None:
    """The newest checkpoint that is intact; None if there are none at all. Raises if all of them are damaged.

    Damaged ones that are newer are warned of, one by one, and set aside if the directory `is_ours` to change.
    """
    paths = found(directory)
    for number, path in enumerate(reversed(paths)):
        try:
            checkpoint = load(path)
        except RunDirectoryError as error:
            warn(f"{error}; trying the one before")
            continue
        for damaged in paths[len(paths) - number :] if is_ours else ():
            set_aside(damaged, "damaged")
        return checkpoint
    if paths:
        raise RunDirectoryError(f"every checkpoint in {directory} is damaged; choose another run_dir or delete them")
    return None


def best(directory: Path) -> Path | None:
    """The one with the highest score; None if none has one."""
    return next(iter(_best(found(directory))), None)


def set_aside(path: Path, why: str) -> Path:
    """Takes a checkpoint out of the way without losing it."""
    target = path.with_name(f"{why}.{path.name}")
    shutil.rmtree(target, ignore_errors=True)
    return path.rename(target)


def load(path: Path) -> Checkpoint:
    """One checkpoint, after checking it against its manifest."""
    try:
        _check_digests(path)
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


def _best(paths: list[Path]) -> list[Path]:
    """The one with the highest score, the newest of several; none if none has one."""
    scored = [(score, path) for path in paths if (score := _score(path)) is not None]
    return [max(scored)[1]] if scored else []


def _score(path: Path) -> float | None:
    try:
        score = json.loads((path / STATE).read_bytes()).get("score")
    except (OSError, ValueError, AttributeError):
        return None
    return score if isinstance(score, int | float) else None


def _milestones(paths: list[Path], interval: int) -> set[Path]:
    """The first one in every interval of env steps, but for the interval that the run begins with."""
    first: dict[int, Path] = {}
    for path in paths if interval else ():
        first.setdefault(int(path.name.partition(".")[0]) // interval, path)
    first.pop(0, None)
    return set(first.values())


def _remove(path: Path) -> None:
    """Not under its own name: one that is deleted half-way must not look complete."""
    hidden = path.with_name(f".{path.name}")
    with contextlib.suppress(OSError):
        shutil.rmtree(path.rename(hidden), ignore_errors=True)


def _write_files(path: Path, checkpoint: Checkpoint) -> None:
    contents = {
        TENSORS: safetensors.torch.save(_apart(checkpoint.tensors)),
        STATE: json.dumps(checkpoint.state).encode(),
    }
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    for name, content in contents.items():
        _write(path / name, content)
    _write(path / MANIFEST, json.dumps(digests).encode())
    _sync(path)


def _check_digests(path: Path) -> None:
    """Raises RunDirectoryError, or whatever reading gives, if the files are not those that were meant to be written."""
    digests = json.loads((path / MANIFEST).read_bytes())
    for name in (TENSORS, STATE):
        if _digest(path / name) != digests[name]:
            raise RunDirectoryError(f"checkpoint {path} is damaged: {name} does not match its manifest")


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
