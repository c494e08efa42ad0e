"""The contract of a model, and the actor-critic every built-in network is a case of. Knows nothing of losses."""

import math
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.specs import CategoricalSpec, EnvSpec, tree_map
from seedrl.types import ModelInput, ModelOutput

SLOWEST = 0.001  # share of a train batch in running statistics, at least
SMALLEST_UNIT = 0.01
INITIAL_LOG_STD = -0.5
FORBIDDEN = -1e9  # a logit that no other one is ever below; finite, so that zero times it is zero


class Model(Protocol):
    """What seedrl needs of an `nn.Module`, yours included: `YourModel(spec, **options)` builds it.

    `spec` is the EnvSpec with frames already stacked. The recurrent state of one environment is a flat vector of
    `core_size` floats (0 for none); it starts as zeros, and the model zeroes it wherever `inputs.reset` is true. Its
    `logits` have `spec.policy_size` columns; seedrl/actions.py says what they mean.
    Parameters are registered as in any nn.Module.
    """

    core_size: int

    def __call__(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        """Inputs [T+1, B, ...] and core_state [B, core_size] to outputs and the core_state after the last row."""
        ...


def core_size_of(model: nn.Module) -> int:
    """`core_size` of a module that is a Model; nn.Module itself does not promise that attributes are numbers."""
    size = model.core_size
    assert isinstance(size, int)
    return size


class Encoder(Protocol):
    """Observations [N, ...] to features [N, size]."""

    size: int

    def __call__(self, observation: Tensor) -> Tensor: ...


class ActorCritic(nn.Module):
    """An encoder, an optional LSTM or GRU, a policy head and a value head."""

    def __init__(
        self, encoder: nn.Module, size: int, spec: EnvSpec, lstm: int = 0, gru: int = 0, popart: bool = False
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self._actions = Actions(spec)
        inputs = size + self._actions.feature_size + 1
        self.core = LstmCore(inputs, lstm) if lstm else GruCore(inputs, gru) if gru else None
        self.core_size = 2 * lstm or gru
        self.policy_head = policy_head(lstm or gru or size, spec)
        value = scaled(nn.Linear(lstm or gru or size, 1), gain=1.0)
        self.value_head = PopArt(value) if popart else value

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        rows, batch = inputs.reward.shape
        features = self.encoder(tree_map(lambda leaf: leaf.flatten(0, 1), inputs.observation)).view(rows, batch, -1)
        if self.core is not None:
            features = torch.cat([features, self._memories(inputs)], dim=-1)
            features, core_state = self.core(features, inputs.reset, core_state)
        logits = self.policy_head(features)
        value = self.value_head(features).squeeze(-1)
        return ModelOutput(logits, value), core_state

    def _memories(self, inputs: ModelInput) -> Tensor:
        """What a recurrent policy remembers besides observations: its last action and its clipped reward."""
        return torch.cat([self._actions.features(inputs.last_action), inputs.reward.clamp(-1, 1).unsqueeze(-1)], dim=-1)


class LstmCore(nn.Module):
    """An LSTM over time whose state is one vector [B, 2 * units] and restarts from zeros at every reset row."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(inputs, units)
        with torch.no_grad():
            nn.init.orthogonal_(self.cell.weight_ih, gain=math.sqrt(2))
            nn.init.orthogonal_(self.cell.weight_hh)
            self.cell.bias_ih[units : 2 * units] = 1.0  # the forget gate: a state halved in every step is soon gone

    def forward(self, features: Tensor, reset: Tensor, core_state: Tensor) -> tuple[Tensor, Tensor]:
        hidden, cell = core_state.chunk(2, dim=-1)
        outputs = []
        for feature, reset_t in zip(features, reset.unsqueeze(-1), strict=True):
            # Filled, not multiplied by zero: that would keep a NaN for ever.
            hidden, cell = self.cell(feature, (hidden.masked_fill(reset_t, 0), cell.masked_fill(reset_t, 0)))
            outputs.append(hidden)
        return torch.stack(outputs), torch.cat([hidden, cell], dim=-1)


class GruCore(nn.Module):
    """The same with a GRU, whose state is one vector [B, units]."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(inputs, units)

    def forward(self, features: Tensor, reset: Tensor, core_state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for feature, reset_t in zip(features, reset.unsqueeze(-1), strict=True):
            core_state = self.cell(feature, core_state.masked_fill(reset_t, 0))
            outputs.append(core_state)
        return torch.stack(outputs), core_state


def policy_head(size: int, spec: EnvSpec) -> nn.Module:
    deviations = [column for column, is_one in enumerate(_deviation_columns(spec)) if is_one]
    if not deviations:
        return scaled(nn.Linear(size, spec.policy_size), gain=0.01)
    return GaussianHead(size, spec.policy_size, deviations)


class GaussianHead(nn.Module):
    """Deviations of amounts are learned as they are, the same for every observation: a network would soon have them
    vanish where it is sure of itself, and then a small step changes the policy beyond recognition."""

    order: Tensor

    def __init__(self, size: int, numbers: int, deviations: list[int]) -> None:
        super().__init__()
        others = [column for column in range(numbers) if column not in deviations]
        self.linear = scaled(nn.Linear(size, len(others)), gain=0.01)
        self.log_std = nn.Parameter(torch.full((len(deviations),), INITIAL_LOG_STD))
        self.register_buffer("order", torch.tensor([*others, *deviations]).argsort(), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        log_std = self.log_std.expand(*features.shape[:-1], -1)
        return torch.cat([self.linear(features), log_std], dim=-1).index_select(-1, self.order)


def _deviation_columns(spec: EnvSpec) -> list[bool]:
    """Which of the policy's numbers are logarithms of deviations."""
    columns: list[bool] = []
    for leaf in spec.actions:
        size = leaf.policy_size
        columns += [False] * size if isinstance(leaf, CategoricalSpec) else [False] * (size // 2) + [True] * (size // 2)
    return columns


class PopArt(nn.Module):
    """A value head in units of its own targets (van Hasselt et al. 2016, arXiv:1602.07714): rewards may have any size.

    `rescale` follows the targets and changes the weights so that no value changes.
    """

    mean: Tensor
    square: Tensor
    seen: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("square", torch.ones(()))  # mean square
        self.register_buffer("seen", torch.zeros(()))  # train batches

    @property
    def unit(self) -> Tensor:
        """The standard deviation of targets."""
        return (self.square - self.mean.square()).clamp(min=SMALLEST_UNIT**2).sqrt()

    def forward(self, features: Tensor) -> Tensor:
        value: Tensor = self.linear(features) * self.unit + self.mean
        return value

    @torch.no_grad()
    def rescale(self, mean: Tensor, square: Tensor) -> None:
        """Takes in the mean and the mean square of the targets of a train batch."""
        mean_before, unit_before = self.mean.clone(), self.unit
        self.seen += 1
        share = (1 / self.seen).clamp(min=SLOWEST)
        self.mean.lerp_(mean, share)
        self.square.lerp_(square, share)
        self.linear.weight *= unit_before / self.unit
        self.linear.bias.mul_(unit_before).add_(mean_before - self.mean).div_(self.unit)


def popart_of(model: nn.Module) -> PopArt | None:
    """The head of this kind that a model has, yours included."""
    return next((module for module in model.modules() if isinstance(module, PopArt)), None)


class Masked(nn.Module):
    """A model that never chooses what the environment forbids: the logits of those choices are out of reach."""

    _columns: Tensor

    def __init__(self, model: nn.Module, spec: EnvSpec) -> None:
        super().__init__()
        assert spec.mask is not None
        self.model = model
        self.core_size = core_size_of(model)
        self._name = spec.mask
        self.register_buffer("_columns", _choice_columns(spec), persistent=False)

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        output, core_state = self.model(inputs, core_state)
        assert isinstance(inputs.observation, dict)
        columns = self._columns
        newest = inputs.observation[self._name].flatten(2)[..., -len(columns) :] != 0  # of stacked frames
        forbidden = torch.zeros_like(output.logits, dtype=torch.bool).index_copy(2, columns, ~newest)
        return output._replace(logits=output.logits.masked_fill(forbidden, FORBIDDEN)), core_state


def _choice_columns(spec: EnvSpec) -> Tensor:
    """Which of the policy's numbers are logits of choices; a mask has an entry for each."""
    columns, at = [], 0
    for leaf in spec.actions:
        columns += list(range(at, at + leaf.policy_size)) if isinstance(leaf, CategoricalSpec) else []
        at += leaf.policy_size
    return torch.tensor(columns)


Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def scaled(layer: Layer, gain: float = math.sqrt(2)) -> Layer:
    """Orthogonal weights of this gain (the default keeps the variance through a ReLU), zero bias."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
