"""Builds a model from `model.*` settings and an EnvSpec. The only module that knows the built-in networks by name."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from seedrl import plugins
from seedrl.actions import Actions
from seedrl.config import Activation, LearnerConfig, ModelConfig
from seedrl.errors import ConfigError
from seedrl.models.base import ActionCritic, ActorCritic, Masked
from seedrl.models.check import check_model
from seedrl.models.images import GridEncoder, ImageEncoder, board_encoder, impala_encoder, is_image, nature_encoder
from seedrl.models.mlp import MlpEncoder, TinyEncoder
from seedrl.models.precision import lower
from seedrl.specs import ArraySpec, ContinuousSpec, EnvSpec
from seedrl.types import Observation

BUILT_IN = ("mlp", "nature", "impala", "grid", "board", "tiny")
SMALLEST_IMAGE = {"nature": 36, "impala": 1, "grid": 3, "board": 4}  # height and width that the kernels need
ACTIVATIONS: dict[Activation, type[nn.Module]] = {Activation.tanh: nn.Tanh, Activation.relu: nn.ReLU}
CPU = torch.device("cpu")
LeafEncoder = MlpEncoder | TinyEncoder | ImageEncoder | GridEncoder
IMAGES: dict[str, Callable[[ArraySpec, bool], LeafEncoder]] = {
    "nature": nature_encoder,
    "impala": impala_encoder,
    "grid": GridEncoder,
    "board": board_encoder,
}


def build_run_model(config: LearnerConfig, spec: EnvSpec, device: torch.device = CPU) -> nn.Module:
    """Return the model of a run, freshly initialised on a device; `spec` is the environment's, of single frames.

    Raises ConfigError if it is the user's own and its outputs do not fit the spaces.
    """
    stacked = spec.stacked(config.env.frame_stack)
    model = build_model(config.model, stacked, config.seed).to(device)
    lower(model, config.model.precision, device)
    if plugins.is_import_path(config.model.name):
        check_model(model, stacked, f"model.name={config.model.name}")
    return model


def build_model(config: ModelConfig, spec: EnvSpec, seed: int) -> nn.Module:
    """Return a freshly initialised model for observations with their frames already stacked."""
    torch.manual_seed(seed)
    model = _own_model(config, spec) if plugins.is_import_path(config.name) else _actor_critic(config, spec)
    return model if spec.mask is None else Masked(model, spec)


def _actor_critic(config: ModelConfig, spec: EnvSpec) -> ActorCritic:
    if config.name not in ("auto", *BUILT_IN):
        raise ConfigError(f"model.name={config.name!r} is not one of auto, {', '.join(BUILT_IN)} or your.module:Class")
    encoder = _encoders(config, spec)
    critic = _encoders(config, spec) if _has_own_critic(config, spec) else None
    return ActorCritic(
        encoder,
        encoder.size,
        spec,
        config.lstm,
        config.gru,
        config.popart,
        critic,
        config.state_std,
        action_critic=partial(_action_critic, config, spec),
    )


def _action_critic(config: ModelConfig, spec: EnvSpec) -> ActionCritic:
    """Return a critic with layers of the same sizes; the action joins before the last one."""
    encoder = _encoders(replace(config, layers=config.layers[:-1]), spec)
    size, activation = Actions(spec).feature_size, ACTIVATIONS[config.activation]
    return ActionCritic(encoder, encoder.size, size, config.layers[-1:], activation)


def _has_own_critic(config: ModelConfig, spec: EnvSpec) -> bool:
    """Tell whether values have a network of their own: unless it is set, where it pays and costs little."""
    if config.separate is not None:
        return config.separate
    has_images = any(_fits("grid", leaf) for leaf in spec.observations)
    is_continuous = all(isinstance(leaf, ContinuousSpec) for leaf in spec.actions)
    return is_continuous and not has_images and not config.lstm and not config.gru


def _encoders(config: ModelConfig, spec: EnvSpec) -> "Encoders | LeafEncoder":
    if isinstance(spec.observation, dict):
        return Encoders(config, spec.observation, spec.mask)
    return _encoder(config, spec.observation)


class Encoders(nn.Module):
    """One network for each leaf, except for the mask; their features are concatenated."""

    def __init__(self, config: ModelConfig, observation: dict[str, ArraySpec], mask: str | None) -> None:
        super().__init__()
        seen = {name: leaf for name, leaf in observation.items() if name != mask}
        if not any(_fits("impala", leaf) for leaf in seen.values()) and config.name in IMAGES:
            raise ConfigError(f"model.name={config.name} needs an image among {', '.join(map(str, seen.values()))}")
        self._names = list(seen)
        encoders = [_encoder(config, leaf, among_others=True) for leaf in seen.values()]
        self.encoders = nn.ModuleList(encoders)
        self.size = sum(encoder.size for encoder in encoders)

    def forward(self, observation: Observation) -> Tensor:
        assert isinstance(observation, dict)
        pairs = zip(self.encoders, self._names, strict=True)
        return torch.cat([encoder(observation[name]) for encoder, name in pairs], dim=-1)


def _encoder(config: ModelConfig, observation: ArraySpec, among_others: bool = False) -> LeafEncoder:
    """Return the network for one leaf. Among others, a network for images is used only for leaves that are images."""
    name = config.name
    if name == "auto" or (among_others and name in IMAGES and not _fits(name, observation)):
        name = next((each for each in ("nature", "grid") if _fits(each, observation)), "mlp")
    if name == "tiny" and observation.shape:
        return TinyEncoder(observation)
    if name not in IMAGES:
        activation = ACTIVATIONS[config.activation]
        return MlpEncoder(observation, list(config.layers), config.normalize, config.layer_norm, activation)
    if not _fits(name, observation):
        size = SMALLEST_IMAGE[name]
        raise ConfigError(
            f"model.name={name} needs images [channels, height, width] of {size}×{size} or more; "
            f"observations are {observation}; set model.name=mlp"
        )
    return IMAGES[name](observation, config.layer_norm)


def _fits(name: str, observation: ArraySpec) -> bool:
    return is_image(observation, SMALLEST_IMAGE[name])


def _own_model(config: ModelConfig, spec: EnvSpec) -> nn.Module:
    model = plugins.build("model.name", config.name, spec, **config.options)
    if not isinstance(model, nn.Module) or not isinstance(getattr(model, "core_size", None), int):
        raise ConfigError(
            f"model.name={config.name} must be an nn.Module with an integer core_size; see seedrl/models/base.py"
        )
    return model
