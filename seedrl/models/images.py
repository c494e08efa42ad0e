"""Networks for images: of DQN (Mnih et al. 2015), the deep one of IMPALA (Espeholt et al. 2018), for grids and boards.

Images are [channels, height, width], or [height, width, channels] with at most four channels in a frame.
"""

import math

import torch
from torch import Tensor, nn

from seedrl.models.base import scaled
from seedrl.models.statistics import share_of
from seedrl.specs import ArraySpec

KINDS = 12  # small integers, 0 … 11, that stand for kinds of things, as in MiniGrid


class ImageEncoder(nn.Module):
    """A convolutional trunk and one linear layer, in channels_last layout: on CPU a third faster than NCHW."""

    def __init__(self, observation: ArraySpec, trunk: nn.Module, size: int, layer_norm: bool = False) -> None:
        super().__init__()
        self._has_channels_last = observation.channel_axis == 2
        self.centre = Centre(ArraySpec(_channels_first(observation), observation.dtype))
        self.trunk = trunk
        with torch.no_grad():
            flat = trunk(torch.zeros(1, *_channels_first(observation))).numel()
        self.linear = scaled(nn.Linear(flat, size))
        self.norm = nn.LayerNorm(size) if layer_norm else nn.Identity()
        self.size = size
        self.is_low = False  # whether it computes in bfloat16, see precision.py
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, observation: Tensor) -> Tensor:
        pixels = observation.permute(0, 3, 1, 2) if self._has_channels_last else observation
        return torch.relu(self.norm(self._features(self.centre(pixels))))

    def _features(self, pixels: Tensor) -> Tensor:
        if not self.is_low:
            features: Tensor = self.linear(self.trunk(pixels).flatten(1))
            return features
        with torch.autocast(pixels.device.type, torch.bfloat16):
            features = self.linear(self.trunk(pixels).flatten(1))
        return features.float()


class Centre(nn.Module):
    """Subtracts the running mean from pixels, and divides by a quarter of their range.

    Most of an Atari screen never changes. Without this the few pixels that move (a ball, two paddles) are one percent
    of the network's input, and it takes hundreds of thousands of steps until it uses them. The mean is learned in
    training only, and published with the weights.
    """

    mean: Tensor
    seen: Tensor
    staged: Tensor

    def __init__(self, observation: ArraySpec) -> None:
        super().__init__()
        self.unit = 64 if observation.dtype == "uint8" else 0.25
        self.register_buffer("mean", torch.zeros(1, *observation.shape))
        self.register_buffer("seen", torch.zeros(()))  # train batches
        staged = torch.zeros(2, *observation.shape, dtype=torch.float64)  # sums of 1 and of pixels
        self.register_buffer("staged", staged, persistent=False)

    def forward(self, observation: Tensor) -> Tensor:
        pixels = observation.contiguous(memory_format=torch.channels_last).to(torch.float32, copy=True)
        if torch.is_grad_enabled():
            self._stage(pixels[::8])
        return pixels.sub_(self.mean).mul_(1 / self.unit)

    def _stage(self, pixels: Tensor) -> None:
        self.staged[0] += len(pixels)
        self.staged[1] += pixels.mean(dim=0).double() * len(pixels)

    def apply_staged(self) -> None:
        is_usable = self.staged.isfinite().all() & (self.staged[0] > 0).all()
        count, total = torch.where(is_usable, self.staged, 1.0)
        self.seen += is_usable
        self.mean.lerp_((total / count).float(), torch.where(is_usable, share_of(self.seen), 0))


def is_image(observation: ArraySpec, smallest: int) -> bool:
    """Return whether observations are images of at least `smallest` × `smallest` pixels."""
    shape = observation.shape
    return len(shape) == 3 and not observation.values and min(_channels_first(observation)[1:]) >= smallest


def _channels_first(observation: ArraySpec) -> tuple[int, ...]:
    first, second, third = observation.shape
    return (third, first, second) if observation.channel_axis == 2 else observation.shape


def nature_encoder(observation: ArraySpec, layer_norm: bool = False) -> ImageEncoder:
    layers: list[nn.Module] = []
    channels = _channels_first(observation)[0]
    for width, kernel_size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        norm = [nn.GroupNorm(1, width)] if layer_norm else []  # one group: over channels, height and width
        layers += [scaled(nn.Conv2d(channels, width, kernel_size, stride)), *norm, nn.ReLU()]
        channels = width
    return ImageEncoder(observation, nn.Sequential(*layers), 512, layer_norm)


def impala_encoder(observation: ArraySpec, layer_norm: bool = False) -> ImageEncoder:
    sections: list[nn.Module] = []
    channels = _channels_first(observation)[0]
    for width in (16, 32, 32):
        sections += [
            nn.Conv2d(channels, width, kernel_size=3, padding=1),
            nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
            ResidualBlock(width),
            ResidualBlock(width),
        ]
        channels = width
    return ImageEncoder(observation, nn.Sequential(*sections, nn.ReLU()), 256, layer_norm)


def board_encoder(observation: ArraySpec, layer_norm: bool = False) -> ImageEncoder:
    """Return one layer of 4×4 windows without a border and one that sees all of them, for the boards of games.

    Every line of four lies in a window with its surroundings, so that what is learned of a threat holds anywhere on
    the board; fully connected layers learn it for each place anew.
    """
    norm = [nn.GroupNorm(1, 128)] if layer_norm else []
    windows = scaled(nn.Conv2d(_channels_first(observation)[0], 128, kernel_size=4))
    return ImageEncoder(observation, nn.Sequential(windows, *norm, nn.ReLU()), 256, layer_norm)


class GridEncoder(nn.Module):
    """One wide layer over small grids whose cells hold kinds of things, encoded one-hot.

    As a number a key (5) is almost a ball (6). With convolutions over the numbers, or over the one-hot columns, a
    recurrent policy never learned to remember which of the two it had seen; with one wide layer it does. A last column
    has the number itself, for cells that hold a quantity.
    """

    kinds: Tensor

    def __init__(self, observation: ArraySpec, layer_norm: bool = False) -> None:
        super().__init__()
        self._unit = 255.0 if observation.dtype == "uint8" else 1.0
        self.register_buffer("kinds", torch.arange(KINDS), persistent=False)
        columns = 1 + KINDS  # per cell, at most two of them not zero: hence the gain
        self.linear = scaled(nn.Linear(math.prod(observation.shape) * columns, 128), gain=math.sqrt(columns))
        self.norm = nn.LayerNorm(128) if layer_norm else nn.Identity()
        self.size = 128

    def forward(self, observation: Tensor) -> Tensor:
        cells = observation.flatten(1).unsqueeze(-1)
        columns = torch.cat([(cells == self.kinds).float(), cells.float() / self._unit], dim=-1)
        return torch.tanh(self.norm(self.linear(columns.flatten(1))))


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(width, width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, kernel_size=3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y
