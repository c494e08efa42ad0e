"""The content of a run's checkpoint, how it is restored, and which one is loaded.

Knows the parts of the learner, but not the files (checkpoint.py) or when they are written (saving.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from seedrl.algorithms.settings import RESOLVED, AlgorithmConfig
from seedrl.errors import ConfigError, RunDirectoryError
from seedrl.run import checkpoint as files
from seedrl.run.checkpoint import Checkpoint, Tensors
from seedrl.run.directory import another_algorithm
from seedrl.run.saving import best_of
from seedrl.run.totals import Counts, score_of
from seedrl.specs import EnvSpec, decoded_spec, encoded_spec

NEWEST, BEST = "newest", "best"
SHOWN = 3  # weights that do not fit, in a message


class Restorable(Protocol):
    """The part of a learner that a checkpoint holds."""

    model: nn.Module

    def tensors(self) -> Tensors: ...

    def load(self, tensors: Tensors) -> None: ...


class SavedLeague(Protocol):
    """The bank and the league, which survive the learner together."""

    def tensors(self) -> Tensors: ...

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any], tensors: Tensors) -> None: ...


class ReplayMemory(Protocol):
    """The store, if its unrolls survive the learner."""

    def tensors(self) -> Tensors: ...

    def load(self, tensors: Tensors) -> bool: ...


@dataclass
class Resumable:
    """The parts of a learner that survive it. Owned by the learner thread while that runs."""

    learner: Restorable
    generator: torch.Generator
    spec: EnvSpec
    algorithm: AlgorithmConfig  # resolved
    store: ReplayMemory | None = None  # None if its unrolls are not saved
    league: SavedLeague | None = None  # None if there are no opponents

    def take(self, seconds: float, counts: Counts) -> Checkpoint:
        """Return a snapshot; `seconds` is how long the run has taken, `counts` what all ranks have counted."""
        tensors = {
            **self.learner.tensors(),
            "generator": self.generator.get_state(),
            **(files.with_prefix("bank", self.league.tensors()) if self.league is not None else {}),
        }
        state = {
            "spec": encoded_spec(self.spec),
            "algorithm": {name: getattr(self.algorithm, name) for name in RESOLVED},
            "parameters": count_parameters(self.learner.model),
            "seconds": seconds,
            **counts,
            "score": score_of(counts),
            **({"league": self.league.state()} if self.league is not None else {}),
        }
        return Checkpoint(tensors, state, self.store.tensors() if self.store is not None else None)

    def restore(self, checkpoint: Checkpoint, say: Callable[[str], None], is_first: bool = True) -> float:
        """Restore everything but the counters; return the seconds the run had taken.

        The generator in a checkpoint is that of the first rank. The others have one each, seeded for every process.
        """
        state = checkpoint.state
        self._expect_same_algorithm(state)
        load_weights(self.learner.model, checkpoint)
        self.learner.load(checkpoint.tensors)
        if self.league is not None and "league" in state:
            self.league.load(state["league"], files.without_prefix("bank", checkpoint.tensors))
        if is_first:
            self._restore_generator(checkpoint, say)
            self._restore_store(checkpoint, say)
        return float(state["seconds"])

    def _expect_same_algorithm(self, state: dict[str, Any]) -> None:
        """Refuse what another algorithm has left; config.yaml may be gone."""
        trained_with = state.get("algorithm", {}).get("name", self.algorithm.name)
        if trained_with != self.algorithm.name:
            raise RunDirectoryError(another_algorithm("the run", trained_with, self.algorithm.name))

    def _restore_store(self, checkpoint: Checkpoint, say: Callable[[str], None]) -> None:
        """Restore the unrolls of a replay memory, or fill it again if there are none or they do not fit."""
        if self.store is None:
            return
        if checkpoint.store is None:
            say("learner: the checkpoint holds no unrolls; the store is filled again")
        elif self.store.load(checkpoint.store):
            say(f"learner: the store continues with {len(checkpoint.store['unrolls/reward']):,} unrolls")
        else:
            say(
                "learner: the unrolls of the checkpoint do not fit, because store.capacity, store.select or what an "
                "unroll holds has changed; the store is filled again"
            )

    def _restore_generator(self, checkpoint: Checkpoint, say: Callable[[str], None]) -> None:
        """Restore the random numbers, or seed them again if the checkpoint is from another kind of device."""
        saved = checkpoint.tensors["generator"]
        if saved.shape == self.generator.get_state().shape:
            self.generator.set_state(saved)
            return
        updates = checkpoint.state["learning"]["updates"]
        origin = np.random.SeedSequence([self.generator.initial_seed(), updates])
        self.generator.manual_seed(int(origin.generate_state(1)[0]))
        say(
            f"learner: the checkpoint was written on another kind of device than {self.generator.device}, whose random "
            f"numbers cannot be continued here; they are seeded again from the seed and {updates:,} updates"
        )


def count_parameters(model: nn.Module) -> int:
    """Return how many numbers are trained; running statistics are not."""
    return sum(parameter.numel() for parameter in model.parameters())


def spec_of(checkpoint: Checkpoint) -> EnvSpec:
    """Return the spaces that a run was trained on."""
    try:
        return decoded_spec(checkpoint.state["spec"])
    except (KeyError, TypeError, AttributeError) as error:
        raise RunDirectoryError(
            "the checkpoint holds its spaces in a form that this version of seedrl does not read; start a new run"
        ) from error


def load_weights(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Load the weights of a checkpoint. Raises RunDirectoryError naming those that do not fit."""
    weights = files.without_prefix("model", checkpoint.tensors)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reasons = _misfits(weights, model.state_dict()) or [str(error)]
        more = [f"{len(reasons) - SHOWN} more"] if len(reasons) > SHOWN else []
        raise RunDirectoryError(
            f"the checkpoint does not fit this model: {'; '.join([*reasons[:SHOWN], *more])}. "
            "It was trained with other model settings, or on an environment with other spaces"
        ) from error


def _misfits(there: Tensors, here: Tensors) -> list[str]:
    """Return how the weights of a checkpoint differ from those of a model."""
    shapes = [
        f"{name} is {list(there[name].shape)} there and {list(here[name].shape)} here"
        for name in there.keys() & here.keys()
        if there[name].shape != here[name].shape
    ]
    only_there = [f"{name} is only there" for name in there.keys() - here.keys()]
    return sorted(shapes) + sorted(only_there) + sorted(f"{name} is only here" for name in here.keys() - there.keys())


def chosen_checkpoint(run: Path, which: str, warn: Callable[[str], None]) -> Checkpoint:
    """Load a checkpoint of a run: its newest, its best, or the one of this name or directory. Change nothing there."""
    directory = run / "checkpoints"
    if which == NEWEST:
        newest = files.load_newest(directory, warn)
        if newest is None:
            raise ConfigError(f"there is no checkpoint in {directory} yet")
        return newest
    if which == BEST:
        best = best_of(directory)
        if best is None:
            raise ConfigError(f"no checkpoint in {directory} has a score of 100 episodes; take checkpoint=newest")
        return files.load(best)
    for path in (Path(which), directory / which):
        if (path / files.MANIFEST).exists():
            return files.load(path)
    known = ", ".join([NEWEST, BEST, *(path.name for path in files.found(directory))])
    raise ConfigError(f"checkpoint={which} is neither a checkpoint's directory nor one of {known}")


def initial_weights(source: str, warn: Callable[[str], None], setting: str = "init_from") -> Checkpoint:
    """Load the checkpoint that a setting names, or the newest of the run directory that it names."""
    path = Path(source)
    if (path / files.MANIFEST).exists():
        return files.load(path)
    checkpoint = files.load_newest(path / "checkpoints", warn)
    if checkpoint is None:
        raise ConfigError(f"{setting}={source} is neither a checkpoint nor a run directory with one")
    return checkpoint
