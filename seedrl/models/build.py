"""From `model.*` settings and an EnvSpec to a model. The one place that knows the built-in networks by name."""

import importlib

import torch
from torch import nn

from seedrl.config import ModelConfig
from seedrl.errors import ConfigError
from seedrl.models.base import ActorCritic
from seedrl.models.images import impala_encoder, nature_encoder
from seedrl.models.mlp import MlpEncoder, TinyEncoder
from seedrl.specs import EnvSpec

BUILT_IN = ("mlp", "nature", "impala", "tiny")


def build_model(config: ModelConfig, spec: EnvSpec, seed: int) -> nn.Module:
    """A freshly initialised model for observations as `spec` gives them, frames already stacked."""
    torch.manual_seed(seed)
    is_image = len(spec.observation.shape) == 3
    name = config.name if config.name != "auto" else "nature" if is_image else "mlp"
    if ":" in name:
        return _own_model(name, config, spec)
    if name not in BUILT_IN:
        raise ConfigError(f"model.name={name!r} is not one of auto, {', '.join(BUILT_IN)} or your.module:Class")
    if name == "mlp":
        encoder = MlpEncoder(spec.observation, list(config.hidden))
        return ActorCritic(encoder, encoder.size, spec.num_actions, config.lstm)
    if name == "tiny":
        tiny = TinyEncoder(spec.observation)
        return ActorCritic(tiny, tiny.size, spec.num_actions, config.lstm)
    if not is_image:
        raise ConfigError(
            f"model.name={name} needs images [channels, height, width]; observations are {spec.observation}"
        )
    images = nature_encoder(spec.observation) if name == "nature" else impala_encoder(spec.observation)
    return ActorCritic(images, images.size, spec.num_actions, config.lstm)


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
