"""The optimiser and its schedules. Knows nothing of losses."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from seedrl.config import AlgorithmConfig, Optimizer


def build_optimizer(config: AlgorithmConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    if config.optimizer is Optimizer.adam:
        return torch.optim.Adam(parameters, lr=config.learning_rate, eps=config.epsilon, fused=True)
    return torch.optim.RMSprop(
        parameters,
        lr=config.learning_rate,
        alpha=config.rmsprop_decay,
        eps=config.epsilon,
        momentum=config.rmsprop_momentum,
        foreach=True,
    )


def linear(start: float, end: float | None, fraction: float) -> float:
    """`start` at fraction 0, `end` from fraction 1 on; constant without an end."""
    if end is None:
        return start
    return start + (end - start) * min(max(fraction, 0.0), 1.0)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scales gradients down to `max_norm` (0: leaves them); returns the norm they had."""
    return nn.utils.clip_grad_norm_(parameters, max_norm if max_norm > 0 else float("inf"), foreach=True)
