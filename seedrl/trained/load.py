"""A trained policy, read from a run directory. Changes nothing there."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seedrl.config import LearnerConfig
from seedrl.models.build import build_model
from seedrl.run.directory import RunDirectory
from seedrl.run.snapshot import NEWEST, chosen_checkpoint, load_weights, spec_of
from seedrl.specs import EnvSpec
from seedrl.trained.step import StepPolicy


@dataclass(frozen=True, slots=True)
class Trained:
    """A policy with what it was trained as and on."""

    run_dir: Path
    config: LearnerConfig
    spec: EnvSpec  # of single frames, as the environment shows them
    policy: StepPolicy
    state: dict[str, Any]  # counters and the like, of its checkpoint

    @property
    def env_steps(self) -> int:
        return int(self.state["serving"]["env_steps"])


def load_trained(run: str, which: str = NEWEST) -> Trained:
    """The policy of a run directory; `which` is newest, best, or a checkpoint's directory or name."""
    run_directory = RunDirectory(Path(run))
    config = run_directory.config()
    checkpoint = chosen_checkpoint(run_directory.path, which, warn=lambda words: print(words, file=sys.stderr))
    spec = spec_of(checkpoint)
    seen = spec.stacked(config.env.frame_stack)
    model = build_model(config.model, seen, config.seed)
    load_weights(model, checkpoint)
    return Trained(run_directory.path, config, spec, StepPolicy(model, seen, config.model.squash), checkpoint.state)
