"""Runs a model once on made-up rows and compares its outputs with the spaces. Knows nothing of losses or training."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.errors import ConfigError
from seedrl.models.base import Masked, core_size_of
from seedrl.specs import MASK, ArraySpec, EnvSpec
from seedrl.tracebacks import failed, place_of_code
from seedrl.types import ModelInput, ModelOutput, Observation

BATCH = 2
LENGTHS = (1, 3)  # rows of a batch of inference, and of an unroll in training


def check_model(model: nn.Module, spec: EnvSpec, setting: str) -> None:
    """Raise ConfigError if a model does not fulfil seedrl.models.base.Model; `spec` has its frames stacked.

    A copy runs, so that neither statistics nor random numbers of the model change.
    """
    own = model.model if isinstance(model, Masked) else model
    tried = copy.deepcopy(own).eval()
    device = next(own.parameters(), torch.zeros(0)).device
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for length in LENGTHS:
            _check_outputs(tried, sample_input(spec, length, BATCH, device), spec, setting)


def sample_input(spec: EnvSpec, rows: int, batch: int, device: torch.device) -> ModelInput:
    """Return random rows [rows, batch, ...] as a model gets them; the first of them begin episodes."""
    generator = torch.Generator().manual_seed(1)
    actions = Actions(spec)
    reset = torch.zeros(rows, batch, dtype=torch.bool)
    reset[0] = True
    action_type = torch.int64 if actions.dtype.kind == "i" else torch.float32
    inputs = ModelInput(
        observation=_sample(spec, (rows, batch), generator),
        reward=torch.zeros(rows, batch),
        last_action=torch.zeros((rows, batch, *actions.shape), dtype=action_type),
        reset=reset,
    )
    return inputs.tree_map(lambda tensor: tensor.to(device))


def _sample(spec: EnvSpec, rows: tuple[int, int], generator: torch.Generator) -> Observation:
    if not isinstance(spec.observation, dict):
        return _sample_leaf("", spec.observation, rows, generator)
    return {name: _sample_leaf(name, leaf, rows, generator) for name, leaf in spec.observation.items()}


def _sample_leaf(name: str, leaf: ArraySpec, rows: tuple[int, int], generator: torch.Generator) -> Tensor:
    shape, dtype = (*rows, *leaf.shape), getattr(torch, leaf.dtype)
    if name.rpartition("/")[2] == MASK:
        return torch.ones(shape, dtype=dtype)  # everything is allowed
    if dtype.is_floating_point:
        return (2 * torch.rand(shape, generator=generator) - 1).to(dtype)
    most = leaf.values or {"uint8": 256, "bool": 2}.get(leaf.dtype, 1)
    return torch.randint(0, most, shape, generator=generator).to(dtype)


def _check_outputs(model: nn.Module, inputs: ModelInput, spec: EnvSpec, setting: str) -> None:
    rows, batch = inputs.reward.shape
    size = core_size_of(model)
    try:
        result = model(inputs, torch.zeros(batch, size, device=inputs.reward.device))
    except Exception as error:
        shown = f"{setting} failed on inputs [{rows}, {batch}, …] of {spec}"
        raise failed(ConfigError, shown, error) from error
    where = place_of_code(type(model).forward)
    about = f"{where}: {setting}" if where else setting
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], ModelOutput):
        raise ConfigError(f"{about} must return (ModelOutput(logits, value), core_state), returned {_brief(result)}")
    output, core_state = result
    why = f"the last size is spec.policy_size, {spec.policy_size} for {spec}"
    _expect(about, "logits", output.logits, (rows, batch, spec.policy_size), why)
    _expect(about, "value", output.value, (rows, batch), "one number per row; squeeze the last axis of a Linear(…, 1)")
    _expect(about, "core_state", core_state, (batch, size), f"its last size is the core_size of the model, {size}")


def _expect(about: str, name: str, tensor: Any, shape: tuple[int, ...], why: str) -> None:
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
        raise ConfigError(f"{about}: expected {name} of shape {list(shape)} ({why}), saw {_brief(tensor)}")
    if tensor.dtype is not torch.float32:
        raise ConfigError(f"{about}: expected {name} in float32, saw {_brief(tensor)}; convert it by .float()")
    if not tensor.isfinite().all():
        raise ConfigError(f"{about}: expected finite {name}, saw {tensor[~tensor.isfinite()][0].item()}")


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"({', '.join(_brief(each) for each in value)})"
    return type(value).__name__
