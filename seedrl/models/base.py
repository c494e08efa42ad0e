"""The contract of a model, and the actor-critic that all built-in networks share. Knows nothing of losses."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.models.cores import GruCore, LstmCore
from seedrl.models.statistics import RunningMoments
from seedrl.specs import ArraySpec, CategoricalSpec, EnvSpec, tree_map
from seedrl.types import ModelInput, ModelOutput, Observation

MIN_UNIT = 0.01
INITIAL_LOG_STD = 0.0
FORBIDDEN = -1e9  # the logit of a forbidden choice: below all others, and finite, so that zero times it is zero


class Model(Protocol):
    """The interface that seedrl needs of an `nn.Module`. Your own class is built with `YourModel(spec, **options)`.

    `spec` is the EnvSpec with frames already stacked. The recurrent state of one environment is a flat vector of
    `core_size` floats (0 for none); it starts as zeros, and the model zeroes it wherever `inputs.reset` is true. The
    `logits` are the parameters of the distribution of actions: `spec.policy_size` columns, see seedrl/actions.py.
    Weights and buffers are registered as in any nn.Module. Auxiliary losses go into `ModelOutput.aux`, and cost nothing
    in inference if they are computed only while `torch.is_grad_enabled()`.
    """

    core_size: int

    def __call__(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        """Map inputs [T+1, B, ...] and core_state [B, core_size] to outputs and the core_state after the last row."""
        ...


def core_size_of(model: nn.Module) -> int:
    """Return the `core_size` of a module that is a Model; for mypy, attributes of nn.Module are tensors or modules."""
    size = model.core_size
    assert isinstance(size, int)
    return size


class Encoder(Protocol):
    """A network from observations [N, ...] to features [N, size]."""

    size: int

    def __call__(self, observation: Tensor) -> Tensor: ...


class ActorCritic(nn.Module):
    """An encoder, an optional LSTM or GRU, a policy head and a value head.

    With a `critic`, an encoder of the same size, the value head has features of its own. It has no memory.
    """

    def __init__(
        self,
        encoder: nn.Module,
        size: int,
        spec: EnvSpec,
        lstm: int = 0,
        gru: int = 0,
        popart: bool = False,
        critic: nn.Module | None = None,
        state_std: bool = False,
        action_critic: Callable[[], nn.Module] | None = None,
    ) -> None:
        """`action_critic` returns a new ActionCritic for the same observations."""
        super().__init__()
        self.encoder = encoder
        self.critic = critic
        self._actions = Actions(spec)
        inputs = size + self._actions.feature_size + 1
        self.core = LstmCore(inputs, lstm) if lstm else GruCore(inputs, gru) if gru else None
        self.core_size = 2 * lstm or gru
        self.policy_head = policy_head(lstm or gru or size, spec, state_std)
        value = scaled(nn.Linear(lstm or gru or size, 1), gain=1.0)
        self.value_head = PopArt(value) if popart else value
        self.action_critic = action_critic

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        rows, batch = inputs.reward.shape
        observation = tree_map(lambda leaf: leaf.flatten(0, 1), inputs.observation)
        features = self.encoder(observation).view(rows, batch, -1)
        if self.core is not None:
            features = torch.cat([features, self._past(inputs)], dim=-1)
            features, core_state = self.core(features, inputs.reset, core_state)
        logits = self.policy_head(features)
        if self.critic is not None:
            features = self.critic(observation).view(rows, batch, -1)
        value = self.value_head(features).squeeze(-1)
        return ModelOutput(logits, value), core_state

    def _past(self, inputs: ModelInput) -> Tensor:
        """Return what a recurrent core sees besides the observation: the last action and the clipped reward."""
        return torch.cat([self._actions.features(inputs.last_action), inputs.reward.clamp(-1, 1).unsqueeze(-1)], dim=-1)


class ActionCritic(nn.Module):
    """The value Q(x, a) of a continuous action, which joins the features of an encoder (as in arXiv:1509.02971).

    Algorithms train it besides the model (`ActorCritic.action_critic` makes one); it is never served.
    """

    def __init__(
        self, encoder: nn.Module, size: int, action_size: int, sizes: Sequence[int], activation: type[nn.Module]
    ) -> None:
        """`size` is that of the features; `sizes` are those of the layers before the last."""
        super().__init__()
        self.encoder = encoder
        layers: list[nn.Module] = []
        for before, after in pairwise([size + action_size, *sizes]):
            layers += [scaled(nn.Linear(before, after)), activation()]
        self.layers = nn.Sequential(*layers, scaled(nn.Linear([size + action_size, *sizes][-1], 1), gain=1.0))

    def forward(self, observation: Observation, action: Tensor) -> Tensor:
        """Return values [T, B] for observations [T, B, ...] and actions [T, B, action_size]."""
        features = self.encoder(tree_map(lambda leaf: leaf.flatten(0, 1), observation))
        value: Tensor = self.layers(torch.cat([features, action.flatten(0, 1)], dim=-1))
        return value.view(action.shape[:2])


def policy_head(size: int, spec: EnvSpec, state_std: bool = False) -> nn.Module:
    """Return the layer from features to the parameters of the distribution of actions."""
    log_stds = [column for column, is_log_std in enumerate(_log_std_columns(spec)) if is_log_std]
    if state_std or not log_stds:
        return scaled(nn.Linear(size, spec.policy_size), gain=0.01)
    return GaussianHead(size, spec.policy_size, log_stds)


class GaussianHead(nn.Module):
    """A policy head whose log standard deviations are weights of their own, the same for every observation.

    A network would soon let them vanish where it is certain, and then a small step changes the policy completely.
    """

    order: Tensor

    def __init__(self, size: int, parameters: int, log_stds: list[int]) -> None:
        super().__init__()
        others = [column for column in range(parameters) if column not in log_stds]
        self.linear = scaled(nn.Linear(size, len(others)), gain=0.01)
        self.log_std = nn.Parameter(torch.full((len(log_stds),), INITIAL_LOG_STD))
        self.register_buffer("order", torch.tensor([*others, *log_stds]).argsort(), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        log_std = self.log_std.expand(*features.shape[:-1], -1)
        return torch.cat([self.linear(features), log_std], dim=-1).index_select(-1, self.order)


def _log_std_columns(spec: EnvSpec) -> list[bool]:
    """Return, for each parameter of the policy's distribution, whether it is a log standard deviation."""
    columns: list[bool] = []
    for leaf in spec.actions:
        size = leaf.policy_size
        columns += [False] * size if isinstance(leaf, CategoricalSpec) else [False] * (size // 2) + [True] * (size // 2)
    return columns


class PopArt(nn.Module):
    """A value head in units of its own targets, so that rewards may have any scale.

    van Hasselt et al. 2016, arXiv:1602.07714. `rescale` follows the targets, and changes the weights so that the
    values stay the same.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.moments = RunningMoments()  # of the targets

    @property
    def mean(self) -> Tensor:
        """Return the mean of the targets."""
        return self.moments.mean.float()

    @property
    def unit(self) -> Tensor:
        """Return the standard deviation of the targets."""
        return self.moments.variance.clamp(min=MIN_UNIT**2).sqrt().float()

    def forward(self, features: Tensor) -> Tensor:
        value: Tensor = self.linear(features) * self.unit + self.mean
        return value

    @torch.no_grad()
    def rescale(self, mean: Tensor, square: Tensor) -> None:
        """Include the targets of a train batch: their mean, and their mean square about `moments.mean`."""
        mean_before, unit_before = self.mean, self.unit
        self.moments.merge(mean, square)
        self.linear.weight *= unit_before / self.unit
        self.linear.bias.mul_(unit_before).add_(mean_before - self.mean).div_(self.unit)


def popart_of(model: nn.Module) -> PopArt | None:
    """Return the PopArt head of a model, if it has one."""
    return next((module for module in model.modules() if isinstance(module, PopArt)), None)


class Masked(nn.Module):
    """A model that never chooses what the environment forbids: the logits of those choices are `FORBIDDEN`."""

    _columns: Tensor

    def __init__(self, model: nn.Module, spec: EnvSpec) -> None:
        super().__init__()
        assert spec.mask is not None
        self.model = model
        self.core_size = core_size_of(model)
        self._name = spec.mask
        self._leaf = _mask_leaf(spec)
        self.register_buffer("_columns", _choice_columns(spec), persistent=False)

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        output, core_state = self.model(inputs, core_state)
        assert isinstance(inputs.observation, dict)
        columns = self._columns
        allowed = self._newest(inputs.observation[self._name]).flatten(2) != 0
        forbidden = torch.zeros_like(output.logits, dtype=torch.bool).index_copy(2, columns, ~allowed)
        return output._replace(logits=output.logits.masked_fill(forbidden, FORBIDDEN)), core_state

    def _newest(self, mask: Tensor) -> Tensor:
        """Return the last of the frames that are stacked in [T+1, B, ...]."""
        axis = self._leaf.channel_axis
        size = self._leaf.shape[axis] * len(self._columns) // math.prod(self._leaf.shape)
        return mask.narrow(2 + axis, mask.shape[2 + axis] - size, size)


def _mask_leaf(spec: EnvSpec) -> ArraySpec:
    assert isinstance(spec.observation, dict)
    assert spec.mask is not None
    return spec.observation[spec.mask]


def _choice_columns(spec: EnvSpec) -> Tensor:
    """Return which parameters of the policy's distribution are logits; a mask has an entry for each of them."""
    columns, at = [], 0
    for leaf in spec.actions:
        columns += list(range(at, at + leaf.policy_size)) if isinstance(leaf, CategoricalSpec) else []
        at += leaf.policy_size
    return torch.tensor(columns)


Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def scaled(layer: Layer, gain: float = math.sqrt(2)) -> Layer:
    """Initialise a layer with orthogonal weights and zero bias; the default gain keeps the variance through a ReLU."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
