"""The unrolls of a replay memory in a checkpoint: restored exactly, kept once, and left out where they do not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from seedrl.config import LearnerConfig
from seedrl.errors import ConfigError
from seedrl.run import checkpoint as files
from seedrl.run.budget import saved_unrolls
from seedrl.run.checkpoint import STORE, TENSORS, Checkpoint
from seedrl.run.saving import save as save_checkpoint
from seedrl.run.snapshot import Resumable
from seedrl.selection.build import build_selector
from seedrl.specs import ArraySpec, EnvSpec, discrete
from seedrl.store import Store, StoreSizes
from seedrl.validation import check
from tests.builders import learner_parts, record, same
from tests.fakes import TinyModel, make_spec
from tests.rig import CPU, make_model

CAPACITY = 20


class Memory:
    """A store with a replay memory of unrolls of 3 steps."""

    def __init__(self, select: str, capacity: int = CAPACITY, seed: int = 1, slots: int = 4) -> None:
        config = LearnerConfig(seed=seed)
        config.algorithm.batch_size, config.serving.max_slots = 4, slots
        config.store.select, config.store.capacity = select, capacity
        config.store.samples_per_insert = 0.0 if select == "mixed" else 2.0
        config.store.tolerance = 100.0  # samples by which acting may be ahead
        self.added = 2 if select == "mixed" else 4  # unrolls before each train batch
        self.spec = make_spec()
        self.model = make_model(self.spec, core_size=3)
        self.store = Store(self.spec, build_selector(config), StoreSizes(slots, capacity, 3, 1, 3), CPU)

    def act(self, turns: int) -> None:
        """Add unrolls beyond the capacity, and train on some, with priorities that differ."""
        for turn in range(turns):
            record(self.store, self.model, self.spec, self.added, seed=turn, policy_version=turn)
            self.train()

    def train(self) -> Any:
        unrolls = self.store.take(4, timeout=0)
        if unrolls is not None:
            self.store.prefer(unrolls.ticket, unrolls.inputs.reward.abs().sum(dim=0))
        return unrolls


@pytest.mark.parametrize("select", ["uniform", "priority", "mixed"])
def test_unrolls_priorities_and_random_numbers_are_restored_bit_for_bit(select: str, tmp_path: Path) -> None:
    """The restored memory has other entries, and yet the same train batches follow."""
    memory, other = Memory(select), Memory(select, seed=2, slots=9)
    memory.act(12)
    saved = memory.store.tensors()
    path = save_checkpoint(tmp_path, 1, Checkpoint({}, {}, saved), keep=1)
    loaded = files.load(path, with_store=True).store
    assert loaded is not None
    assert other.store.load(loaded)
    assert same(other.store.tensors(), saved)
    assert len(saved["unrolls/reward"]) >= 12
    for turn in range(6):
        for each in (memory, other):
            record(each.store, each.model, each.spec, 2, seed=50 + turn, policy_version=9)
        mine, theirs = memory.train(), other.train()
        assert (mine is None) == (theirs is None)
        if mine is not None:
            tensors = zip(mine.tensors(), theirs.tensors(), strict=True)
            assert all(torch.equal(here, there) for here, there in tensors)


@pytest.mark.parametrize(
    "other", [Memory("uniform", capacity=5), Memory("priority")], ids=["smaller capacity", "other selector"]
)
def test_unrolls_that_do_not_fit_are_left_out(other: Memory) -> None:
    memory = Memory("uniform")
    memory.act(6)
    assert not other.store.load(memory.store.tensors())
    assert other.store.ready == 0


def test_unrolls_of_images_in_trees_are_read_and_written_with_their_frames() -> None:
    leaves = {"image": ArraySpec((1, 4, 4), "uint8"), "vector": ArraySpec((3,), "float32")}
    spec = EnvSpec(leaves, discrete(2))
    one, other = (Store(spec, build_selector(LearnerConfig()), StoreSizes(1, 6, 2, 3, 0), CPU) for _ in range(2))
    for column in one.columns._frames.values():  # type: ignore[union-attr]
        column.words.view(torch.uint8).random_(0, 100, generator=torch.Generator().manual_seed(1))
    read = one.columns.read(one.reserve(4))
    assert read["observation.image"].shape == (4, 5, 1, 4, 4)  # 3 rows, and 2 frames before them
    assert read["observation.vector"].dtype == torch.float32
    entries = other.reserve(4)
    other.columns.write(entries, read)
    assert same(other.columns.read(entries), read)


def test_only_the_newest_checkpoint_keeps_unrolls_and_only_resuming_reads_them(tmp_path: Path) -> None:
    first, second = (
        save_checkpoint(tmp_path, steps, Checkpoint({}, {}, {"unrolls/reward": torch.ones(3)}), keep=2)
        for steps in (1, 2)
    )
    assert [(path / STORE).exists() for path in (first, second)] == [False, True]
    assert (second / STORE).stat().st_mode == (second / TENSORS).stat().st_mode
    assert files.load(first, with_store=True).store is None
    assert files.load(second).store is None
    resumed = files.load_newest(tmp_path, pytest.fail, is_ours=True)
    assert resumed is not None
    assert resumed.store is not None


def test_damaged_unrolls_are_found_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    for steps in (1, 2):
        path = save_checkpoint(tmp_path, steps, Checkpoint({}, {"n": steps}, {"a": torch.ones(3)}), keep=2)
    content = bytearray((path / STORE).read_bytes())
    content[-1] ^= 1
    (path / STORE).write_bytes(content)
    warnings: list[str] = []
    resumed = files.load_newest(tmp_path, warnings.append, is_ours=True)
    assert resumed is not None
    assert resumed.state == {"n": 1}
    assert "store.safetensors does not match its manifest" in warnings[0]


@pytest.mark.parametrize(
    ("unrolls", "words"),
    [("none", "holds no unrolls"), ("others", "do not fit, because store.capacity"), ("its own", "with 20 unrolls")],
)
def test_run_that_is_resumed_says_what_becomes_of_its_unrolls(unrolls: str, words: str) -> None:
    memory, parts = Memory("uniform"), learner_parts(model=TinyModel(make_spec()))
    memory.act(8)
    saved = {"none": None, "others": {}, "its own": memory.store.tensors()}[unrolls]
    other, said = Memory("uniform"), list[str]()
    resumable = Resumable(parts.learner, torch.Generator(), parts.spec, parts.config.algorithm, other.store)
    resumable._restore_store(Checkpoint({}, {}, saved), said.append)
    assert [words in line for line in said] == [True]


def test_size_of_the_unrolls_in_a_checkpoint_is_known_before() -> None:
    memory = Memory("uniform")
    memory.act(8)
    config = LearnerConfig()
    sizes = StoreSizes(4, CAPACITY, 3, 1, 3)
    assert saved_unrolls(config, memory.spec, sizes) == 0
    config.store.checkpoint = True
    tensors = memory.store.tensors()
    unrolls = sum(tensor.nbytes for name, tensor in tensors.items() if name.startswith("unrolls/"))
    assert unrolls <= saved_unrolls(config, memory.spec, sizes) <= 1.2 * unrolls


def test_checkpoint_of_a_queue_is_refused() -> None:
    config = LearnerConfig()
    config.store.checkpoint = True
    with pytest.raises(ConfigError, match=r"store.checkpoint=true has no meaning with store.select=fifo"):
        check(config)
