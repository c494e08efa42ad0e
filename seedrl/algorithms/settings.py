"""The settings under `algorithm.*`: what all algorithms share, and a group for each built-in one.

They stand apart from the algorithms because `--help` and actors must not import torch.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any

from seedrl.schema import group, key

ALGORITHMS = ("ppo", "vtrace", "pqn", "dqn", "sac", "bc")  # the names of the built-in ones
ACTOR_CRITICS = ("ppo", "vtrace")  # those with a policy that a teacher can guide
REPLAYING = ("dqn", "sac")  # those of them that need every unroll many times


class Optimizer(Enum):
    adam = "adam"
    rmsprop = "rmsprop"


class Targets(Enum):
    vtrace = "vtrace"
    gae = "gae"


@dataclass
class VTraceConfig:
    """Settings of `algorithm.name=vtrace`, and of V-trace targets in other algorithms."""

    rho_bar: float = key(1.0, "clip of the importance weight in the value target")
    c_bar: float = key(1.0, "clip of the trace coefficient")
    pg_rho_bar: float = key(1.0, "clip of the importance weight in the policy gradient")
    clip: float = key(
        0.2, "with several passes: how far the probability of an action may move before it has no gradient; 0: any far"
    )


@dataclass
class PPOConfig:
    """Settings of `algorithm.name=ppo`."""

    clip: float = key(0.2, "how far the probability of an action may move from its old one before it has no gradient")
    clip_end: float | None = key(None, "clip at stop.env_steps, reached linearly; null keeps it constant")
    value_clip: float = key(0.0, "the same for values, in standard deviations of their targets; 0 for no clipping")
    max_kl: float = key(0.0, "end the passes over a train batch once the policy has moved this far; 0 for never")
    targets: Targets = key(Targets.vtrace, "vtrace (corrects for the age of unrolls) | gae (trusts recorded values)")


@dataclass
class DQNConfig:
    """Settings of `algorithm.name=dqn`, which is R2D2 if the model has a memory."""

    n_steps: int = key(3, "rewards in a target before it bootstraps from a value")
    burn_in: int = key(
        0, "first rows of each unroll that only bring the core_state up to date; unused if the model has no memory"
    )
    rescale: bool = key(
        False, "learn values on the scale sign(x)(sqrt(|x| + 1) - 1) + x / 1000, so that rewards can be of any size"
    )
    target_period: int = key(500, "gradient steps between copies of the weights to the target network")
    eta: float = key(0.9, "share of an unroll's largest error in its priority; the rest is its mean error")


@dataclass
class SACConfig:
    """Settings of `algorithm.name=sac`."""

    n_steps: int = key(1, "rewards in a target before it bootstraps from a value")
    target_rate: float = key(
        0.005, "share of the way that the target critics follow the trained ones per gradient step"
    )
    temperature: float = key(1.0, "initial weight of the entropy, which is learned")
    target_entropy: float | None = key(
        None, "entropy that this weight is learned for, where -1 … 1 spans the bounds; null for minus the dimensions"
    )


@dataclass
class AlgorithmConfig:
    """Settings of every algorithm. Your own algorithm finds its further ones in `options`."""

    name: str = key("ppo", "ppo | vtrace | pqn | dqn | sac | bc | your.module:Class")
    options: dict[str, Any] = key({}, "keyword arguments for your own algorithm class")
    unroll_length: int = key(256, "steps of one environment per unroll (T)")
    batch_size: int = key(8, "unrolls per train batch (B)")
    passes: int = key(
        0, "passes over each train batch; more reuse data at the cost of older data; 0 lets algorithm and spaces decide"
    )
    minibatches: int = key(0, "gradient steps in each of these passes; 0 lets algorithm and observations decide")
    on_policy: bool | None = key(
        None,
        "train only on what the newest policy did, so that actors wait for every update; null lets ppo do so if "
        "observations are vectors and batch_size is a multiple of the environments",
    )
    discount: float = key(0.99, "discount per step")
    trace_lambda: float = key(0.95, "lambda of the value targets; 1 for n-step returns, 0 for one-step bootstrapping")
    normalize_advantage: bool = key(True, "give the advantages of each train batch mean 0 and standard deviation 1")
    entropy_cost: float | None = key(
        None, "weight of the entropy bonus; null for 0.01, or for 0 if all actions are continuous"
    )
    entropy_cost_end: float | None = key(
        0.0, "entropy_cost at stop.env_steps, reached linearly; null keeps it constant"
    )
    value_cost: float = key(0.5, "weight of the value loss")
    teacher_cost: float = key(1.0, "weight of the distance from the teacher, if there is one (teacher=RUN)")
    teacher_cost_end: float = key(0.0, "teacher_cost after the fraction teacher_decay, reached linearly")
    teacher_decay: float = key(0.5, "fraction of stop.env_steps after which teacher_cost_end is reached")
    reward_scale: float = key(1.0, "factor on rewards, applied before clipping")
    reward_clip: float = key(0.0, "clip rewards to ± this for training; 0 for no clipping")
    optimizer: Optimizer = key(Optimizer.adam, "adam | rmsprop")
    learning_rate: float = key(3e-4, "step size of the optimizer")
    learning_rate_end: float | None = key(
        0.0, "learning_rate at stop.env_steps, reached linearly; null keeps it constant"
    )
    epsilon: float = key(1e-5, "the optimizer's epsilon")
    rmsprop_decay: float = key(0.99, "rmsprop: decay of the squared-gradient average")
    rmsprop_momentum: float = key(0.0, "rmsprop: momentum")
    max_grad_norm: float = key(0.5, "scale gradients down to this norm; 0 for no clipping")
    vtrace: VTraceConfig = group(VTraceConfig)
    ppo: PPOConfig = group(PPOConfig)
    dqn: DQNConfig = group(DQNConfig)
    sac: SACConfig = group(SACConfig)


RESOLVED = ("name", "passes", "minibatches", "on_policy")  # what a checkpoint says of its algorithm


def described(config: AlgorithmConfig) -> str:
    """Return an algorithm in a few words; how a train batch is used is known only once it is resolved."""
    details = []
    if ":" not in config.name and config.passes and config.minibatches:  # one's own may do otherwise
        details.append(f"{_counted(config.passes, 'pass', 'es')} × {_counted(config.minibatches, 'minibatch', 'es')}")
    details += ["on policy"] if config.on_policy else []
    return f"{config.name} ({', '.join(details)})" if details else config.name


def _counted(number: int, word: str, ending: str) -> str:
    return f"{number} {word}{ending if number != 1 else ''}"
