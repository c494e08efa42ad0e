"""When checkpoints are written, what a failure costs, and where a diverged run goes back to."""

from pathlib import Path

import pytest
import torch

from seedrl.config import CheckpointConfig
from seedrl.metrics import LearningMetrics, ServingMetrics
from seedrl.run import checkpoint as files
from seedrl.run.checkpoint import STATE, Checkpoint
from seedrl.run.saving import Saver
from tests.fakes import FakeClock


class Rig:
    """A run of numbers instead of weights: `updates` good ones, and checkpoints of how many there were."""

    def __init__(self, directory: Path, **settings: float) -> None:
        self.directory = directory
        self.serving, self.learning = ServingMetrics(), LearningMetrics()
        self.said: list[str] = []
        self.clock = FakeClock()
        self.saver = Saver(
            CheckpointConfig(**settings),  # type: ignore[arg-type]
            directory,
            self.learning,
            self.said.append,
            self.clock,
        )
        self.saver.begin()

    def train(self, updates: int, skipped: int = 0) -> None:
        self.learning.gradient_steps += updates + skipped
        self.learning.skipped_updates += skipped
        self.serving.env_steps += 100 * (updates + skipped)

    def save(self) -> None:
        self.saver.save(self.take)

    def take(self) -> Checkpoint:
        done = self.learning.gradient_steps - self.learning.skipped_updates
        return Checkpoint(
            {"number": torch.tensor(done)}, {"number": done, "serving": {"env_steps": self.serving.env_steps}}
        )

    def found(self) -> list[int]:
        """Good updates in each checkpoint, oldest first."""
        return [int(files.load(path).state["number"]) for path in files.found(self.directory)]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path, seconds=60.0, keep=3)


def test_saver_is_due_after_a_while_and_not_before(rig: Rig) -> None:
    rig.train(1)
    assert not rig.saver.is_due
    rig.clock.advance(61.0)
    assert rig.saver.is_due
    rig.save()
    assert not rig.saver.is_due
    assert rig.found() == [1]
    assert rig.saver.newest == "000000000100"
    assert rig.learning.checkpoint_seconds.count == 1
    assert rig.learning.checkpoint_timestamp_seconds > 0


def test_saver_that_cannot_write_says_so_counts_it_and_goes_on(rig: Rig) -> None:
    rig.train(1)
    rig.save()
    (rig.directory / ".000000000200").touch()  # in the way of the temporary directory
    rig.train(1)
    rig.save()
    assert rig.found() == [1]
    assert rig.learning.checkpoints_failed == 1
    assert rig.saver.newest == "000000000100"
    assert "no checkpoint could be written" in rig.said[-1]


def test_saver_counts_damaged_checkpoints_after_the_counters_are_restored(rig: Rig, tmp_path: Path) -> None:
    """C2: the previous good one is used, said and counted; not before, as the checkpoint's own counters come first."""
    for _ in range(3):
        rig.train(1)
        rig.save()
    for path in files.found(tmp_path)[1:]:
        (path / STATE).write_text("{}")
    again = Rig(tmp_path)
    checkpoint = again.saver.load()
    assert checkpoint is not None
    assert checkpoint.state["number"] == 1
    again.learning.checkpoints_damaged = 4  # found in earlier lives
    again.saver.begin()
    assert again.learning.checkpoints_damaged == 6
    assert len([words for words in again.said if "is damaged" in words]) == 2
    assert again.saver.newest == "000000000100"


def test_saver_keeps_newest_best_and_milestones(tmp_path: Path) -> None:
    rig = Rig(tmp_path, keep=1, keep_best=True, milestones=300)
    for score in (1.0, 9.0, 2.0, 3.0, 4.0):
        rig.train(1)
        taken = rig.take()
        scored = taken._replace(state={**taken.state, "score": score})
        rig.saver.save(lambda scored=scored: scored)
    assert rig.found() == [2, 3, 5]


# Back from a divergence (B3).


def test_saver_rolls_back_to_the_newest_if_updates_have_worked_since(rig: Rig) -> None:
    rig.train(1)
    rig.save()
    rig.train(2)
    rig.save()
    rig.train(1, skipped=10)
    words = rig.saver.roll_back()
    assert rig.found() == [1, 3]
    assert f"the last good checkpoint is {rig.directory / '000000000300'}" in words


def test_saver_rolls_back_further_if_not_one_update_has_worked_since_the_newest(rig: Rig) -> None:
    rig.train(1)
    rig.save()
    rig.train(1)
    rig.save()
    rig.train(0, skipped=10)
    words = rig.saver.roll_back()
    assert rig.found() == [1]
    assert f"the last good checkpoint is {rig.directory / '000000000100'}" in words
    assert (rig.directory / "diverged.000000000200").is_dir()


def test_saver_rolling_back_again_and_again_never_leaves_none(rig: Rig, tmp_path: Path) -> None:
    """C5, and one life after the other that diverges at once."""
    for _ in range(3):
        rig.train(1)
        rig.save()
    for _ in range(5):
        life = Rig(tmp_path)
        life.train(0, skipped=10)
        life.saver.roll_back()
    assert rig.found() == [1]


def test_saver_without_a_checkpoint_rolls_back_to_the_beginning(rig: Rig) -> None:
    rig.train(0, skipped=10)
    assert "from the beginning" in rig.saver.roll_back()
