"""Reads a trained policy from a run directory. Writes nothing there, and knows nothing of what the policy is for."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seedrl.config import LearnerConfig
from seedrl.models.build import build_run_model
from seedrl.run.directory import RunDirectory
from seedrl.run.snapshot import NEWEST, chosen_checkpoint, load_weights, spec_of
from seedrl.specs import EnvSpec
from seedrl.trained.player import Chance, Player
from seedrl.trained.step import StepPolicy


@dataclass(frozen=True, slots=True)
class Trained:
    """A policy with the settings and the spaces it was trained with."""

    run_dir: Path
    config: LearnerConfig
    spec: EnvSpec  # of single frames, as the environment returns them
    policy: StepPolicy
    state: dict[str, Any]  # the counters and the like of its checkpoint

    @property
    def env_steps(self) -> int:
        return int(self.state["serving"]["env_steps"])

    def player(self, rows: int, chance: Chance | None = None) -> Player:
        """Return what runs the policy in this many environments."""
        return Player(self.policy, self.spec, self.config.env.frame_stack, rows, chance)


def load_trained(run: str, which: str = NEWEST) -> Trained:
    """Load the policy of a run directory; `which` is newest, best, or a checkpoint's directory or name."""
    run_directory = RunDirectory(Path(run))
    config = run_directory.config()
    checkpoint = chosen_checkpoint(run_directory.path, which, warn=lambda words: print(words, file=sys.stderr))
    spec = spec_of(checkpoint)
    model = build_run_model(config, spec)
    load_weights(model, checkpoint)
    policy = StepPolicy(model, spec.stacked(config.env.frame_stack), config.model.squash)
    return Trained(run_directory.path, config, spec, policy, checkpoint.state)
