"""Run directories with a policy in them, made without training; and policies by themselves.

from tests.trained_runs import leave_trained, make_trained
"""

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from seedrl.config import EnvConfig, LearnerConfig, ModelConfig
from seedrl.models.build import build_model
from seedrl.run import checkpoint as files
from seedrl.run.checkpoint import Checkpoint
from seedrl.run.directory import plain
from seedrl.run.saving import save as save_checkpoint
from seedrl.run.snapshot import count_parameters
from seedrl.specs import EnvSpec, encoded_spec
from seedrl.trained.load import Trained, load_trained
from tests.fakes import make_spec

CARTPOLE = make_spec((4,), "float32", num_actions=2)


def leave_trained(
    run_dir: Path,
    spec: EnvSpec = CARTPOLE,
    env: EnvConfig | None = None,
    model: ModelConfig | None = None,
    *,
    seed: int = 1,
    steps: int = 100,
    score: float | None = None,
    algorithm: dict[str, Any] | None = None,
) -> Path:
    """A run directory as a learner leaves it, with one checkpoint more if it is there; its running means are noise."""
    config = LearnerConfig(env=env or EnvConfig(), model=model or ModelConfig(layers=[8]), run_dir=str(run_dir))
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(plain(config)))
    network = with_means(build_model(config.model, spec.stacked(config.env.frame_stack), seed))
    state: dict[str, Any] = {
        "spec": encoded_spec(spec),
        "parameters": count_parameters(network),
        "serving": {"env_steps": steps},
        "learning": {"updates": 1},
        "score": score,
        **({"algorithm": algorithm} if algorithm else {}),
    }
    tensors = files.with_prefix("model", dict(network.state_dict()))
    save_checkpoint(run_dir / "checkpoints", steps, Checkpoint(tensors, state), keep=10)
    return run_dir


def make_trained(run_dir: Path, *arguments: Any, **settings: Any) -> Trained:
    return load_trained(str(leave_trained(run_dir, *arguments, **settings)))


def with_means(model: nn.Module) -> nn.Module:
    """Set the statistics as if the model had seen some observations."""
    generator = torch.Generator().manual_seed(3)
    for name, buffer in model.named_buffers():
        if name.endswith(("mean", "variance")):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return model
