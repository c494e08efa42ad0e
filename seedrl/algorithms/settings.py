"""The settings under `algorithm.*`: what all algorithms share, and a group for each built-in one.

They stand apart from the algorithms because `--help` and actors must not import torch.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from seedrl.schema import group, key


class Optimizer(Enum):
    adam = "adam"
    rmsprop = "rmsprop"


@dataclass
class VTraceConfig:
    """Settings of `algorithm.name=vtrace`."""

    rho_bar: float = key(1.0, "clip of the importance weight in the value target")
    c_bar: float = key(1.0, "clip of the trace coefficient")
    pg_rho_bar: float = key(1.0, "clip of the importance weight in the policy gradient")


@dataclass
class AlgorithmConfig:
    """Settings of every algorithm. Your own algorithm finds its further ones in `options`."""

    name: str = key("vtrace", "vtrace | your.module:Class")
    options: dict[str, Any] = key({}, "keyword arguments for your own algorithm class")
    unroll_length: int = key(20, "steps of one environment per unroll (T)")
    batch_size: int = key(16, "unrolls per train batch (B)")
    passes: int = key(1, "gradient steps per train batch; more reuse each step but on staler data")
    discount: float = key(0.99, "discount per step")
    trace_lambda: float = key(1.0, "lambda of the value targets; 1 for n-step returns, 0 for one-step bootstrapping")
    entropy_cost: float = key(0.01, "weight of the entropy bonus")
    entropy_cost_end: float | None = key(
        None, "entropy_cost at stop.env_steps, reached linearly; null keeps it constant"
    )
    value_cost: float = key(0.5, "weight of the value loss")
    reward_scale: float = key(1.0, "factor on rewards, applied before clipping")
    reward_clip: float = key(0.0, "clip rewards to ± this for training; 0 for no clipping")
    optimizer: Optimizer = key(Optimizer.adam, "adam | rmsprop")
    learning_rate: float = key(1e-3, "step size of the optimizer")
    learning_rate_end: float | None = key(
        None, "learning_rate at stop.env_steps, reached linearly; null keeps it constant"
    )
    epsilon: float = key(1e-5, "the optimizer's epsilon")
    rmsprop_decay: float = key(0.99, "rmsprop: decay of the squared-gradient average")
    rmsprop_momentum: float = key(0.0, "rmsprop: momentum")
    max_grad_norm: float = key(40.0, "scale gradients down to this norm; 0 for no clipping")
    vtrace: VTraceConfig = group(VTraceConfig)
