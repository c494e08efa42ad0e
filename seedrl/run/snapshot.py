"""What a checkpoint of a run holds and how it is put back. Knows the parts of the learner; not when to save."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from seedrl.errors import ConfigError, RunDirectoryError
from seedrl.learning.learner import Learner
from seedrl.ranks.group import Ranks
from seedrl.ranks.separate import RemoteLearner
from seedrl.run import checkpoint as files
from seedrl.run.checkpoint import Checkpoint
from seedrl.run.totals import Counts, score_of
from seedrl.specs import EnvSpec, decoded_spec, encoded_spec

NEWEST, BEST = "newest", "best"


@dataclass
class Resumable:
    """The parts of a learner that survive it. Owned by the learner thread while that runs."""

    learner: Learner | RemoteLearner
    generator: torch.Generator
    spec: EnvSpec

    def take(self, seconds: float, counts: Counts) -> Checkpoint:
        """A snapshot; `seconds` is how long the run has taken so far, `counts` what all ranks have counted."""
        tensors = {
            **self.learner.tensors(),
            "generator": self.generator.get_state(),
        }
        state = {
            "spec": encoded_spec(self.spec),
            "seconds": seconds,
            **counts,
            "score": score_of(counts),
        }
        return Checkpoint(tensors, state)

    def restore(self, checkpoint: Checkpoint, is_first: bool = True) -> float:
        """Puts a snapshot back, but for the counters; returns the seconds the run had taken.

        The generator is that of the first rank. Others have another one each.
        """
        state = checkpoint.state
        load_weights(self.learner.model, checkpoint)
        if self.learner.optimizer is not None:
            files.unpack_optimizer(self.learner.optimizer, files.without_prefix("optimizer", checkpoint.tensors))
        if is_first:
            self.generator.set_state(checkpoint.tensors["generator"])
        return float(state["seconds"])


def share_checkpoint(ranks: Ranks, checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Rank 0's, to all ranks, so that only its machine needs the run directory."""
    if ranks.is_alone:
        return checkpoint
    state = ranks.share(None if checkpoint is None else checkpoint.state)
    if state is None:
        return None
    return Checkpoint(ranks.share_tensors({} if checkpoint is None else checkpoint.tensors), state)


def spec_of(checkpoint: Checkpoint) -> EnvSpec:
    """Return the spaces that a run was trained on."""
    try:
        return decoded_spec(checkpoint.state["spec"])
    except (KeyError, TypeError, AttributeError) as error:
        raise RunDirectoryError(
            "the checkpoint holds its spaces in a form that this version of seedrl does not read; start a new run"
        ) from error


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    try:
        model.load_state_dict(files.without_prefix("model", checkpoint.tensors))
    except RuntimeError as error:
        raise RunDirectoryError(f"the checkpoint does not fit this model: {error}") from error


def chosen_checkpoint(run: Path, which: str, warn: Callable[[str], None]) -> Checkpoint:
    """A checkpoint of a run: its newest, its best, or the one of this name or directory. Changes nothing there."""
    directory = run / "checkpoints"
    if which == NEWEST:
        newest = files.load_newest(directory, warn)
        if newest is None:
            raise ConfigError(f"there is no checkpoint in {directory} yet")
        return newest
    if which == BEST:
        best = files.best(directory)
        if best is None:
            raise ConfigError(f"no checkpoint in {directory} has a score of 100 episodes; take checkpoint=newest")
        return files.load(best)
    for path in (Path(which), directory / which):
        if (path / files.MANIFEST).exists():
            return files.load(path)
    known = ", ".join([NEWEST, BEST, *(path.name for path in files.found(directory))])
    raise ConfigError(f"checkpoint={which} is neither a checkpoint's directory nor one of {known}")


def initial_weights(source: str, warn: Callable[[str], None]) -> Checkpoint:
    """The checkpoint `init_from` names: itself, or the newest of a run directory."""
    path = Path(source)
    if (path / files.MANIFEST).exists():
        return files.load(path)
    checkpoint = files.load_newest(path / "checkpoints", warn)
    if checkpoint is None:
        raise ConfigError(f"init_from={source} is neither a checkpoint nor a run directory with one")
    return checkpoint
