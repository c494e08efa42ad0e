"""Several passes over a train batch, each in minibatches. Knows nothing of losses.

A model without memory is trained on transitions in any order: those of one unroll resemble each other, and few unrolls
would make a poor gradient. A recurrent model is trained on whole unrolls, so that time passes as it did. Either way,
every pass uses every transition once.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from seedrl.types import ModelInput, Unrolls


class Rows(NamedTuple):
    """The rows of gradient steps: [T, N] with a column per unroll, or [1, N] with a column per transition."""

    inputs: ModelInput
    core_state: Tensor  # [N, S]
    given: dict[str, Tensor]  # [T, N, ...] each, what the loss needs besides the model's output

    @classmethod
    def of(cls, unrolls: Unrolls, given: dict[str, Tensor]) -> "Rows":
        """Return the rows at which transitions begin; `given` has [T, B, ...] each."""
        rows = cls(unrolls.inputs.tree_map(lambda tensor: tensor[:-1]), unrolls.core_state, given)
        has_memory = unrolls.core_state.shape[1] > 0
        return rows if has_memory else rows._in_any_order()

    def _in_any_order(self) -> "Rows":
        def in_one_row(tensor: Tensor) -> Tensor:
            return tensor.flatten(0, 1).unsqueeze(0)

        inputs = self.inputs.tree_map(in_one_row)
        core_state = self.core_state.new_zeros(inputs.reward.shape[1], 0)
        return Rows(inputs, core_state, {name: in_one_row(tensor) for name, tensor in self.given.items()})

    @property
    def columns(self) -> int:
        return len(self.core_state)

    def select(self, columns: Tensor) -> "Rows":
        """Return some columns, by their numbers."""
        columns = columns.to(self.core_state.device)
        return Rows(
            self.inputs.tree_map(lambda tensor: tensor.index_select(1, columns)),
            self.core_state.index_select(0, columns),
            {name: tensor.index_select(1, columns) for name, tensor in self.given.items()},
        )


class Selectable(Protocol):
    """Rows or Unrolls: columns to choose from."""

    @property
    def columns(self) -> int:
        """Return how many there are."""
        ...

    def select(self, columns: Tensor) -> Self: ...


Batch = TypeVar("Batch", bound=Selectable)


class Minibatches:
    """Owned by the learner thread."""

    def __init__(self, passes: int, count: int) -> None:
        """`count` is the number of minibatches in a pass."""
        self._passes = passes
        self._count = count
        self._made = 0  # passes so far, which seed the order: it is the same on any device and rank

    def of(self, batch: Batch) -> Iterator[Batch]:
        """Yield minibatches of nearly equal size, in a new order in every pass."""
        for _ in range(self._passes):
            if self._count == 1:
                yield batch
                continue
            order = torch.randperm(batch.columns, generator=torch.Generator().manual_seed(self._made))
            self._made += 1
            for columns in order.chunk(self._count):
                yield batch.select(columns)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint has to hold for the order to continue as it would have."""
        return {"passes": torch.tensor(self._made)}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned; checkpoints of earlier versions have nothing of it."""
        self._made = int(tensors.get("passes", 0))
