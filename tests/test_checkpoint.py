"""Checkpoints through everything that happens to files: kills, full disks, flipped bits, missing parts."""

import itertools
import json
import os
import pickle
import random
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from seedrl.algorithms.settings import Optimizer
from seedrl.config import ModelConfig
from seedrl.errors import RunDirectoryError
from seedrl.learning.optimizer import build_optimizer
from seedrl.models.base import core_size_of
from seedrl.models.build import build_model
from seedrl.run import checkpoint as files
from seedrl.run.checkpoint import MANIFEST, STATE, TENSORS, Checkpoint
from seedrl.run.saving import save as save_checkpoint
from seedrl.specs import EnvSpec
from tests.builders import model_input, one_step, same, weights
from tests.fakes import make_spec
from tests.forks import processes

FILES = (TENSORS, STATE, MANIFEST)


def numbered(number: int) -> Checkpoint:
    """A small checkpoint that can be told from others."""
    return Checkpoint({"number": torch.full((5,), number)}, {"number": number})


def number_of(checkpoint: Checkpoint | None) -> int:
    assert checkpoint is not None
    number = int(checkpoint.state["number"])
    assert checkpoint.tensors["number"].tolist() == [number] * 5
    return number


def newest(directory: Path) -> int:
    """The number of the newest checkpoint, none of which may be damaged."""
    return number_of(files.load_newest(directory, pytest.fail))


def names(directory: Path) -> list[str]:
    """Everything in the directory, hidden or not."""
    return sorted(os.listdir(directory))


# What is written is what is read.


def test_checkpoint_saved_tensors_and_state_are_loaded_unchanged(tmp_path: Path) -> None:
    tensors = {
        "float": torch.randn(3, 4),
        "strided": torch.randn(3, 4).t(),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "number": torch.tensor(7),
        "empty": torch.zeros(0, 3),
        "flags": torch.tensor([True, False]),
        "bytes": torch.Generator().manual_seed(3).get_state(),
        "with gradient": torch.ones(2, requires_grad=True),
    }
    state = {"seconds": 0.1 + 0.2, "nested": {"list": [1, 2.5, None]}, "huge": 2**60}
    loaded = files.load(save_checkpoint(tmp_path, 5, Checkpoint(tensors, state), keep=1))
    assert same(loaded.tensors, {name: tensor.detach() for name, tensor in tensors.items()})
    assert [loaded.tensors[name].dtype for name in tensors] == [tensor.dtype for tensor in tensors.values()]
    assert loaded.state == state


def test_checkpoint_tensors_that_share_memory_are_saved(tmp_path: Path) -> None:
    """Tied weights of an own model appear under two names."""
    tied = torch.randn(3, 2)
    loaded = files.load(save_checkpoint(tmp_path, 5, Checkpoint({"a": tied, "b": tied, "part": tied[:1]}, {}), keep=1))
    assert same(loaded.tensors, {"a": tied, "b": tied, "part": tied[:1]})


def test_checkpoint_save_and_load_use_no_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle was used")

    for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    for name in ("load", "save"):
        monkeypatch.setattr(torch, name, refuse)
    save_checkpoint(tmp_path, 5, numbered(1), keep=1)
    assert newest(tmp_path) == 1


def test_checkpoint_prefixes_come_off_again_and_do_not_mix() -> None:
    one, other = {"a": torch.zeros(1)}, {"a": torch.ones(1), "b/c": torch.ones(2)}
    joined = {**files.with_prefix("model", one), **files.with_prefix("model2", other)}
    assert same(files.without_prefix("model", joined), one)
    assert same(files.without_prefix("model2", joined), other)


# A restored model and optimiser go on as if nothing had happened.

NETWORKS = {
    "mlp": (ModelConfig(name="mlp", layers=[8]), make_spec()),
    "lstm": (ModelConfig(name="mlp", layers=[8], lstm=4), make_spec()),
    "impala": (ModelConfig(name="impala"), make_spec((2, 12, 12), "uint8")),  # weights are channels_last
}
OPTIMIZERS = {
    "adam": one_step(optimizer=Optimizer.adam, learning_rate=0.01),
    "rmsprop": one_step(optimizer=Optimizer.rmsprop, learning_rate=0.01),
    "momentum": one_step(optimizer=Optimizer.rmsprop, learning_rate=0.01, rmsprop_momentum=0.9),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, spec: EnvSpec, batches: range) -> None:
    for seed in batches:
        core_state = torch.zeros(2, core_size_of(model))
        output, _ = model(model_input(spec, rows=4, batch=2, seed=seed), core_state)
        optimizer.zero_grad()
        ((output.value - 1).square().mean() + output.logits.logsumexp(-1).mean()).backward()
        optimizer.step()


@pytest.mark.parametrize("settings", OPTIMIZERS)
@pytest.mark.parametrize("network", NETWORKS)
def test_checkpoint_restored_training_equals_uninterrupted_training(
    tmp_path: Path, network: str, settings: str
) -> None:
    config, spec = NETWORKS[network]
    model = build_model(config, spec, seed=1)
    optimizer = build_optimizer(OPTIMIZERS[settings], model.parameters())
    train(model, optimizer, spec, range(3))
    tensors = {
        **files.with_prefix("model", dict(model.state_dict())),
        **files.with_prefix("optimizer", files.pack_optimizer(optimizer)),
    }
    loaded = files.load(save_checkpoint(tmp_path, 5, Checkpoint(tensors, {}), keep=1)).tensors
    train(model, optimizer, spec, range(3, 6))

    restored = build_model(config, spec, seed=2)
    restored_optimizer = build_optimizer(OPTIMIZERS[settings], restored.parameters())
    restored.load_state_dict(files.without_prefix("model", loaded))
    files.unpack_optimizer(restored_optimizer, files.without_prefix("optimizer", loaded))
    train(restored, restored_optimizer, spec, range(3, 6))

    assert same(weights(restored), weights(model))
    assert same(files.pack_optimizer(restored_optimizer), files.pack_optimizer(optimizer))


@pytest.mark.parametrize("settings", OPTIMIZERS)
def test_checkpoint_optimizer_that_has_not_stepped_is_restored(settings: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(OPTIMIZERS[settings], model.parameters())
    packed = files.pack_optimizer(optimizer)
    files.unpack_optimizer(optimizer, packed)
    assert packed == files.pack_optimizer(optimizer) == {}


# Which checkpoints there are.


def test_checkpoint_directory_without_any_loads_none(tmp_path: Path) -> None:
    assert files.load_newest(tmp_path, pytest.fail) is None
    assert files.load_newest(tmp_path / "absent", pytest.fail) is None


@pytest.mark.parametrize("keep", [1, 3])
def test_checkpoint_save_keeps_the_newest(tmp_path: Path, keep: int) -> None:
    for number in range(1, 6):
        path = save_checkpoint(tmp_path, 1000 * number, numbered(number), keep)
        assert newest(tmp_path) == number
        assert path.is_dir()
    assert names(tmp_path) == [f"{1000 * number:012d}" for number in range(1, 6)][-keep:]


def test_checkpoint_found_are_sorted_by_steps_and_leave_out_the_rest(tmp_path: Path) -> None:
    for steps in (900, 10_000, 2_000_000):
        save_checkpoint(tmp_path, steps, numbered(1), keep=9)
    (tmp_path / "123").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / ".000000009999.77").mkdir()
    assert [path.name for path in files.found(tmp_path)] == ["000000000900", "000000010000", "000002000000"]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_checkpoint_further_ones_of_the_same_steps_are_newer(tmp_path: Path, keep: int) -> None:
    for number in range(1, 7):
        save_checkpoint(tmp_path, 5, numbered(number), keep)
        assert newest(tmp_path) == number
        assert len(names(tmp_path)) == min(number, keep)


def test_checkpoint_save_removes_what_a_killed_save_left(tmp_path: Path) -> None:
    (tmp_path / ".000000000003.4711").mkdir()
    (tmp_path / ".000000000003.4711" / TENSORS).touch()
    save_checkpoint(tmp_path, 5, numbered(1), keep=1)
    assert names(tmp_path) == ["000000000005"]


@pytest.mark.parametrize("keep", [1, 2])
def test_checkpoint_saved_after_a_fallback_outlives_the_damaged_one(tmp_path: Path, keep: int) -> None:
    """The damaged one has more steps than the one saved next: it must not count as the newest to keep."""
    save_checkpoint(tmp_path, 100, numbered(1), keep=2)
    (save_checkpoint(tmp_path, 200, numbered(2), keep=2) / STATE).write_text("{}")
    assert number_of(files.load_newest(tmp_path, lambda _: None)) == 1
    saved = save_checkpoint(tmp_path, 150, numbered(3), keep)
    assert number_of(files.load(saved)) == 3
    assert number_of(files.load_newest(tmp_path, lambda _: None)) == 3


# Which ones stay (C5).


def scored(number: int, score: float | None) -> Checkpoint:
    return numbered(number)._replace(state={"number": number, "score": score})


def test_checkpoint_best_is_kept_until_there_is_a_better_one(tmp_path: Path) -> None:
    kept = []
    for number, score in enumerate([None, 5.0, 3.0, 4.0, None, 7.0, 6.0], start=1):
        save_checkpoint(tmp_path, number, scored(number, score), keep=1, best=True)
        kept.append([int(name) for name in names(tmp_path)])
    assert kept == [[1], [2], [2, 3], [2, 4], [2, 5], [6], [6, 7]]


def test_checkpoint_best_of_equal_ones_is_the_newest(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save_checkpoint(tmp_path, number, scored(number, 5.0 if number < 3 else 1.0), keep=1, best=True)
    assert [int(name) for name in names(tmp_path)] == [2, 3]


def test_checkpoint_milestones_are_kept_for_ever(tmp_path: Path) -> None:
    for steps in (40, 90, 110, 150, 230, 270, 290, 410):
        save_checkpoint(tmp_path, steps, numbered(steps), keep=2, milestones=100)
    assert [int(name) for name in names(tmp_path)] == [110, 230, 290, 410]


def test_checkpoint_state_that_cannot_be_read_has_no_score(tmp_path: Path) -> None:
    for content in ("[]", "{", '{"score": "high"}'):
        (save_checkpoint(tmp_path, 1, scored(1, 9.0), keep=9) / STATE).write_text(content)
    save_checkpoint(tmp_path, 2, scored(2, 1.0), keep=1, best=True)
    assert [int(name) for name in names(tmp_path)] == [2]


def test_checkpoint_that_is_not_what_was_written_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C5: older ones go only after the new one is verified."""
    save_checkpoint(tmp_path, 100, numbered(1), keep=1)
    write = files._write
    monkeypatch.setattr(files, "_write", lambda path, content: write(path, content.replace(b"2", b"3")))
    with pytest.raises(RunDirectoryError, match="does not match its manifest"):
        save_checkpoint(tmp_path, 200, numbered(2), keep=1)
    assert names(tmp_path) == ["000000000100"]
    assert newest(tmp_path) == 1


def test_checkpoint_deleted_half_way_never_looks_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, 100, numbered(1), keep=1)
    monkeypatch.setattr(files.shutil, "rmtree", lambda path, **_: None)  # killed before it began
    save_checkpoint(tmp_path, 200, numbered(2), keep=1)
    assert [path.name for path in files.found(tmp_path)] == ["000000000200"]


# Damage is found, and the checkpoint before is used.


def flip(path: Path, bit: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def flip_first(path: Path) -> None:
    flip(path, 0)


def flip_middle(path: Path) -> None:
    flip(path, 4 * path.stat().st_size + 5)


def flip_last(path: Path) -> None:
    flip(path, 8 * path.stat().st_size - 1)


def lose_last_byte(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lose_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lose_all(path: Path) -> None:
    os.truncate(path, 0)


def zero(path: Path) -> None:
    """As after a power cut: the length was written, the content was not."""
    path.write_bytes(bytes(path.stat().st_size))


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"}")


def empty_list(path: Path) -> None:
    path.write_text("[]")


DAMAGES = [flip_first, flip_middle, flip_last, lose_last_byte, lose_half, lose_all, zero, grow, empty_list, Path.unlink]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_checkpoint_damaged_file_is_noticed_and_the_one_before_used(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    """C2: flipped bits, truncation, missing files."""
    save_checkpoint(tmp_path, 100, numbered(1), keep=3)
    path = save_checkpoint(tmp_path, 200, numbered(2), keep=3)
    damage(path / name)
    warnings: list[str] = []
    assert number_of(files.load_newest(tmp_path, warnings.append)) == 1
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    assert "damaged" in warnings[0]
    assert path.exists()


def test_checkpoint_damaged_in_a_run_of_ours_is_set_aside_once_another_one_was_found(tmp_path: Path) -> None:
    for steps in (100, 200, 300):
        save_checkpoint(tmp_path, steps, numbered(steps), keep=3)
    for steps in (200, 300):
        flip_middle(tmp_path / f"{steps:012d}" / TENSORS)
    warnings: list[str] = []
    assert number_of(files.load_newest(tmp_path, warnings.append, is_ours=True)) == 100
    assert len(warnings) == 2
    assert names(tmp_path) == ["000000000100", "damaged.000000000200", "damaged.000000000300"]
    assert newest(tmp_path) == 100


@pytest.mark.parametrize("name", FILES)
def test_checkpoint_every_single_bit_flip_is_noticed(tmp_path: Path, name: str) -> None:
    path = save_checkpoint(tmp_path, 100, numbered(1), keep=1)
    unnoticed = []
    for bit in range(8 * (path / name).stat().st_size):
        flip(path / name, bit)
        try:
            files.load(path)
            unnoticed.append(bit)
        except RunDirectoryError:
            flip(path / name, bit)
    assert unnoticed == []
    assert newest(tmp_path) == 1  # every bit is back in its place


def test_checkpoint_files_of_another_one_are_noticed(tmp_path: Path) -> None:
    one, other = (save_checkpoint(tmp_path, steps, numbered(steps), keep=2) for steps in (1, 2))
    (one / TENSORS).replace(other / TENSORS)
    with pytest.raises(RunDirectoryError, match=f"{other} is damaged: {TENSORS} does not match its manifest"):
        files.load(other)


def test_checkpoint_all_damaged_is_an_error_that_says_where(tmp_path: Path) -> None:
    for steps in (100, 200):
        flip_middle(save_checkpoint(tmp_path, steps, numbered(steps), keep=2) / TENSORS)
    warnings: list[str] = []
    with pytest.raises(RunDirectoryError, match=f"every checkpoint in {tmp_path} is damaged"):
        files.load_newest(tmp_path, warnings.append, is_ours=True)
    assert len(warnings) == 2
    assert len(files.found(tmp_path)) == 2  # so that the next start does not begin anew without a word


# Saving that fails or is killed harms nothing.


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """Writes beyond this fail half-way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("size", "content"),
    [
        (20, numbered(2)),  # in the tensors
        (500, numbered(2)._replace(state={"number": 2, "long": "x" * 600})),  # in the state
        (170, Checkpoint({}, {})),  # in the manifest
    ],
    ids=FILES,
)
def test_checkpoint_save_on_a_full_disk_fails_and_leaves_no_trace(
    tmp_path: Path, size: int, content: Checkpoint
) -> None:
    save_checkpoint(tmp_path, 100, numbered(1), keep=1)
    with no_file_larger_than(size), pytest.raises(OSError, match="File too large"):
        save_checkpoint(tmp_path, 200, content, keep=1)
    assert names(tmp_path) == ["000000000100"]
    assert newest(tmp_path) == 1


def test_checkpoint_save_of_what_json_cannot_hold_fails_and_leaves_no_trace(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 100, numbered(1), keep=1)
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_checkpoint(tmp_path, 200, Checkpoint({}, {"path": tmp_path}), keep=1)
    assert names(tmp_path) == ["000000000100"]
    assert newest(tmp_path) == 1


CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def save_until_operation(directory: Path, operation: int) -> None:
    """Runs in a process of its own: kills itself at the n-th change to files that a save is about to make."""
    count = itertools.count(1)

    def hook(event: str, _: tuple[Any, ...]) -> None:
        if event in CHANGES and next(count) == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    save_checkpoint(directory, 100, numbered(2), keep=1)


def test_checkpoint_save_killed_at_any_file_operation_leaves_one_that_loads(tmp_path: Path) -> None:
    """Also when it is of the same steps as the only other one, as when a run is resumed and stopped at once."""
    outcomes = []
    for operation in range(1, 100):
        directory = tmp_path / str(operation)
        save_checkpoint(directory, 100, numbered(1), keep=1)
        child = processes.Process(target=save_until_operation, args=(directory, operation))
        child.start()
        child.join()
        outcomes.append(newest(directory))
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        save_checkpoint(directory, 101, numbered(3), keep=1)
        assert names(directory) == ["000000000101"]
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {1, 2}
    assert len(outcomes) > 8  # a save makes at least that many changes


def save_for_ever(directory: Path, reports: Connection) -> None:
    for number in itertools.count(1):
        save_checkpoint(directory, number, numbered(number), keep=2)
        reports.send(number)


def rest_of(reports: Connection) -> Iterator[int]:
    with suppress(EOFError):
        while True:
            yield reports.recv()


def bad_after_kills(directory: Path, seed: int, kills: int) -> int:
    """Kills a process that saves in a loop, at random instants; how often its newest checkpoint was of no use."""
    chance, bad = random.Random(seed), 0
    for number in range(kills):
        where = directory / str(number)
        reports, sender = processes.Pipe(duplex=False)
        child = processes.Process(target=save_for_ever, args=(where, sender))
        child.start()
        sender.close()
        for _ in range(chance.randint(1, 8)):
            reports.recv()
        child.join(timeout=chance.uniform(0, 0.01))  # some moment
        child.kill()
        child.join()
        bad += newest(where) < max(rest_of(reports), default=1)
        save_checkpoint(where, 10**6, numbered(0), keep=1)
        assert names(where) == ["000001000000"]  # and nothing is left of the one that was interrupted
    return bad


def test_checkpoint_process_killed_while_saving_leaves_the_newest_loadable(tmp_path: Path) -> None:
    """C1: 0 bad of 40."""
    assert bad_after_kills(tmp_path, seed=1, kills=40) == 0


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(5))
def test_checkpoint_process_killed_by_the_hundred_leaves_the_newest_loadable(tmp_path: Path, seed: int) -> None:
    """C1: 0 bad of 200, over all seeds."""
    assert bad_after_kills(tmp_path, seed, kills=40) == 0


def test_checkpoint_manifest_holds_the_digests_of_both_files(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 100, numbered(1), keep=1)
    assert names(path) == sorted(FILES)
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest.keys() == {TENSORS, STATE}
    assert all(len(digest) == 64 for digest in manifest.values())
