"""A teacher: a policy that the one in training is kept close to, by a term besides the loss of any algorithm.

The term is the KL divergence of the policy from the teacher, KL(teacher ‖ policy), at the rows that transitions begin
at, times a cost that follows a schedule: kickstarting (Schmitt et al. 2018, arXiv:1803.03835) if the cost falls to
zero, distillation if it stays. Knows nothing of where the teacher's weights come from.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms.base import Algorithm, Batch, Forward, Loss
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.algorithms.transitions import linear
from seedrl.models.base import core_size_of
from seedrl.types import ModelInput, ModelOutput, Unrolls


class NotingForward:
    """A model that notes the inputs and the output of its newest forward pass with gradients."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.newest: tuple[ModelInput, ModelOutput] | None = None

    def __call__(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        output, core_state = self._forward(inputs, core_state)
        if torch.is_grad_enabled():
            self.newest = inputs, output
        return output, core_state


class Taught:
    """An algorithm with a teacher. Owned by the learner thread.

    A recurrent teacher begins every unroll without memory: what it remembered is not recorded.
    """

    def __init__(self, algorithm: Algorithm, teacher: nn.Module, actions: Actions, config: AlgorithmConfig) -> None:
        self._algorithm = algorithm
        self._teacher = teacher.requires_grad_(False).eval()
        self._actions = actions
        self._config = config
        self.overlap = algorithm.overlap

    def __getattr__(self, name: str) -> Any:
        """Return what only some algorithms have: networks, signs, initial priorities."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._algorithm, name)

    def batches(self, unrolls: Unrolls) -> Iterator[Batch]:
        return self._algorithm.batches(unrolls)

    def valid(self, batch: Batch) -> Tensor:
        return self._algorithm.valid(batch)

    def loss(self, batch: Batch, forward: Forward, fraction: float) -> Loss:
        noting, config = NotingForward(forward), self._config
        loss = self._algorithm.loss(batch, noting, fraction)
        cost = linear(config.teacher_cost, config.teacher_cost_end, fraction / config.teacher_decay)
        distance = self._distance(noting, self._algorithm.valid(batch)) if cost else torch.zeros_like(loss.total)
        about = {"teacher_kl": distance.detach(), "teacher_cost": torch.full_like(distance.detach(), cost)}
        total = loss.total + cost * distance if cost else loss.total
        return loss._replace(total=total, report={**loss.report, **about})

    def _distance(self, noting: NotingForward, valid: Tensor) -> Tensor:
        """Return the mean of KL(teacher ‖ policy) over the valid transitions."""
        assert noting.newest is not None, "the algorithm runs the model it is given"
        inputs, output = noting.newest
        with torch.no_grad():
            nothing = output.logits.new_zeros(inputs.reward.shape[1], core_size_of(self._teacher))
            taught, _ = self._teacher(inputs, nothing)
        distance = self._actions.divergence(taught.logits, output.logits)[: len(valid)]
        return (valid * distance).sum() / valid.sum().clamp(min=1)

    def stepped(self, loss: Loss) -> None:
        self._algorithm.stepped(loss)

    def tensors(self) -> dict[str, Tensor]:
        return self._algorithm.tensors()

    def load(self, tensors: dict[str, Tensor]) -> None:
        self._algorithm.load(tensors)
