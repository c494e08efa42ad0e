"""The settings that follow from an environment's spaces. Knows kinds of observations and actions, no environments.

`env.id=X` alone has to learn whatever X is. Most settings suit everything; those here do not. They are resolved once,
as soon as the spaces are known, and only where the settings leave them open.
"""

from dataclasses import replace
from typing import NamedTuple

from seedrl.config import LearnerConfig
from seedrl.models.images import is_image
from seedrl.sizes import can_be_on_policy
from seedrl.specs import CategoricalSpec, EnvSpec, leaves


class Effort(NamedTuple):
    """The gradient steps that a train batch is worth."""

    passes: int
    minibatches: int


ONE_STEP = Effort(1, 1)
ON_VECTORS = {"ppo": Effort(10, 32), "vtrace": Effort(2, 4), "pqn": Effort(2, 16), "bc": Effort(1, 8)}
ON_UNROLLS = {
    "ppo": Effort(10, 8),
    "vtrace": Effort(2, 4),
    "pqn": Effort(2, 8),
    "bc": Effort(1, 4),
}  # rows of an unroll are alike
ON_IMAGES = {
    "ppo": Effort(2, 8),
    "vtrace": Effort(1, 4),
    "pqn": Effort(2, 8),
    "bc": Effort(1, 4),
}  # a step costs a thousand times as much
LARGE = 32  # pixels; smaller images are no more work than vectors
ENTROPY_COST = 0.01  # of choices; the deviation of a Gaussian shrinks slowly enough by itself


def resolve(config: LearnerConfig, spec: EnvSpec) -> LearnerConfig:
    """Return the settings with nothing left open."""
    algorithm = config.algorithm
    is_large = any(is_image(leaf, LARGE) for leaf in leaves(spec.observation))
    has_memory = bool(config.model.lstm or config.model.gru)
    efforts = ON_IMAGES if is_large else ON_UNROLLS if has_memory else ON_VECTORS
    effort = efforts.get(algorithm.name, ONE_STEP)
    has_choices = any(isinstance(leaf, CategoricalSpec) for leaf in spec.actions)
    entropy_cost = ENTROPY_COST if has_choices else 0.0
    waits = algorithm.name == "ppo" and not is_large and can_be_on_policy(config)
    resolved = replace(
        algorithm,
        passes=algorithm.passes or effort.passes,
        minibatches=algorithm.minibatches or effort.minibatches,
        entropy_cost=entropy_cost if algorithm.entropy_cost is None else algorithm.entropy_cost,
        on_policy=waits if algorithm.on_policy is None else algorithm.on_policy,
    )
    return replace(config, algorithm=resolved)
