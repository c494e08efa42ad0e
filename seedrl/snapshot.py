"""What a checkpoint of a run holds and how it is put back. Knows the parts of the learner; not when to save."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from google.protobuf.json_format import MessageToDict, ParseDict
from torch import nn

from seedrl.errors import ConfigError, RunDirectoryError
from seedrl.learning import checkpoint as files
from seedrl.learning.checkpoint import Checkpoint
from seedrl.learning.learner import Learner
from seedrl.metrics import LearningMetrics, ServingMetrics, restore_totals, totals_of
from seedrl.specs import EnvSpec
from seedrl.v1 import inference_pb2 as pb
from seedrl.wire import codec

NEWEST, BEST = "newest", "best"


@dataclass
class Resumable:
    """The parts of a learner that survive it. Owned by the learner thread while that runs."""

    learner: Learner
    generator: torch.Generator
    serving: ServingMetrics
    learning: LearningMetrics
    spec: EnvSpec

    def take(self, seconds: float) -> Checkpoint:
        """A snapshot; `seconds` is how long the run has taken so far."""
        tensors = {
            **files.with_prefix("model", dict(self.learner.model.state_dict())),
            **files.with_prefix("optimizer", files.pack_optimizer(self.learner.optimizer)),
            "generator": self.generator.get_state(),
        }
        state = {
            "spec": MessageToDict(codec.encode_ready(self.spec).ready),
            "seconds": seconds,
            "serving": totals_of(self.serving),
            "learning": totals_of(self.learning),
            "returns": list(self.serving.returns.copy()),
            "lengths": list(self.serving.lengths.copy()),
            "eval_returns": list(self.serving.eval_returns.copy()),
            "score": self._score(),
        }
        return Checkpoint(tensors, state)

    def _score(self) -> float | None:
        """The mean return, once it is one of a hundred episodes: a lucky first one is not the best policy."""
        return self.serving.return_mean_100 if len(self.serving.returns) == self.serving.returns.maxlen else None

    def restore(self, checkpoint: Checkpoint) -> float:
        """Puts a snapshot back, but for the counters; returns the seconds the run had taken."""
        state = checkpoint.state
        load_weights(self.learner.model, checkpoint)
        files.unpack_optimizer(self.learner.optimizer, files.without_prefix("optimizer", checkpoint.tensors))
        self.generator.set_state(checkpoint.tensors["generator"])
        return float(state["seconds"])


def restore_counters(checkpoint: Checkpoint, serving: ServingMetrics, learning: LearningMetrics) -> None:
    """Before anything counts: whoever looks sees them go on, and nobody else writes them yet."""
    state = checkpoint.state
    restore_totals(serving, state["serving"])
    restore_totals(learning, state["learning"])
    serving.returns.extend(state["returns"])
    serving.lengths.extend(state["lengths"])
    serving.eval_returns.extend(state.get("eval_returns", []))


def spec_of(checkpoint: Checkpoint) -> EnvSpec:
    """The spaces a run was trained on."""
    return codec.decode_ready(ParseDict(checkpoint.state["spec"], pb.Ready()))


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
