"""Run directories that look trained, made by hand: settings and a checkpoint of any weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seedrl.config import LearnerConfig
from seedrl.run.checkpoint import Checkpoint
from seedrl.run.directory import RunDirectory
from seedrl.run.saving import save as save_checkpoint
from seedrl.specs import EnvSpec, encoded_spec
from seedrl.types import ModelInput, ModelOutput
from tests.integration.support import NUM_ACTIONS, SPEC, tiny_config


class Favourite(nn.Module):
    """A model that returns its weights, the same numbers for every observation."""

    core_size = 0

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.zeros(spec.policy_size))

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        return ModelOutput(self.numbers.expand(*inputs.reward.shape, -1), inputs.reward), core_state


def favouring(action: int, by: float = 1.0, updates: int = 7, score: float | None = None) -> Checkpoint:
    """Weights of a Favourite for SPEC."""
    numbers = torch.zeros(NUM_ACTIONS)
    numbers[action] = by
    return checkpoint_of({"model/numbers": numbers}, SPEC, updates, score)


def checkpoint_of(tensors: dict[str, Tensor], spec: EnvSpec, updates: int, score: float | None = None) -> Checkpoint:
    state = {
        "spec": encoded_spec(spec),
        "serving": {"env_steps": 100 * updates},
        "learning": {"updates": updates},
        "score": score,
    }
    return Checkpoint(tensors, state)


def save(run: Path, checkpoint: Checkpoint) -> Path:
    return save_checkpoint(run / "checkpoints", checkpoint.state["serving"]["env_steps"], checkpoint, keep=10)


def make_run(run: Path, *checkpoints: Checkpoint, change: Callable[[LearnerConfig], Any] = lambda config: None) -> Path:
    """A run of a Favourite, unless `change` makes it another one."""
    config = tiny_config(str(run), "127.0.0.1:1")
    config.model.name = f"{__name__}:Favourite"
    change(config)
    directory = RunDirectory.prepare(config)
    directory.claim(config)
    directory.release()
    for checkpoint in checkpoints:
        save(run, checkpoint)
    return run
