"""The optimiser. Knows nothing of losses."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from seedrl.algorithms.settings import AlgorithmConfig, Optimizer


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


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale gradients down to `max_norm` (0 leaves them as they are); return the norm they had."""
    return nn.utils.clip_grad_norm_(parameters, max_norm if max_norm > 0 else float("inf"), foreach=True)
