"""From `model.*` settings and an EnvSpec to a model. The one place that knows the built-in networks by name."""

import importlib

import torch
from torch import nn

from seedrl.config import ModelConfig
from seedrl.errors import ConfigError
from seedrl.models.base import ActorCritic
from seedrl.models.images import ImageEncoder, impala_encoder, nature_encoder
from seedrl.models.mlp import MlpEncoder, TinyEncoder
from seedrl.specs import ArraySpec, EnvSpec

BUILT_IN = ("mlp", "nature", "impala", "tiny")
SMALLEST_IMAGE = {"nature": 36, "impala": 1}  # pixels each way, for the strides of the network


def build_model(config: ModelConfig, spec: EnvSpec, seed: int) -> nn.Module:
    """A freshly initialised model for observations as `spec` gives them, frames already stacked."""
    torch.manual_seed(seed)
    name = config.name
    if name == "auto":
        name = "nature" if _fits("nature", spec.observation) else "mlp"
    if ":" in name:
        return _own_model(name, config, spec)
    encoder = _encoder(name, config, spec.observation)
    return ActorCritic(encoder, encoder.size, spec.num_actions, config.lstm)


def _encoder(name: str, config: ModelConfig, observation: ArraySpec) -> MlpEncoder | TinyEncoder | ImageEncoder:
    if name not in BUILT_IN:
        raise ConfigError(f"model.name={name!r} is not one of auto, {', '.join(BUILT_IN)} or your.module:Class")
    if name == "mlp":
        return MlpEncoder(observation, list(config.layers))
    if name == "tiny":
        return TinyEncoder(observation)
    if not _fits(name, observation):
        size = SMALLEST_IMAGE[name]
        raise ConfigError(
            f"model.name={name} needs images [channels, height, width] of {size}×{size} or more; "
            f"observations are {observation}; set model.name=mlp"
        )
    return nature_encoder(observation) if name == "nature" else impala_encoder(observation)


def _fits(name: str, observation: ArraySpec) -> bool:
    return len(observation.shape) == 3 and min(observation.shape[1:]) >= SMALLEST_IMAGE[name]


def _own_model(path: str, config: ModelConfig, spec: EnvSpec) -> nn.Module:
    module_name, _, class_name = path.partition(":")
    try:
        model = getattr(importlib.import_module(module_name), class_name)(spec, **config.options)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"model.name={path} could not be built: {error}") from error
    if not isinstance(model, nn.Module) or not isinstance(getattr(model, "core_size", None), int):
        raise ConfigError(
            f"model.name={path} must be an nn.Module with an integer core_size; see seedrl/models/base.py"
        )
    return model
