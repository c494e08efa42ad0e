"""The protocol of an algorithm: from a train batch to a loss. Knows nothing of processes, stores, optimisers or ranks.

The learner drives it (seedrl/learning/learner.py):

    for batch in algorithm.batches(unrolls):
        loss = algorithm.loss(batch, model, fraction)
        … backward, clip, and if everything is finite, step …
        algorithm.stepped(loss)
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from seedrl.types import ModelInput, ModelOutput, Unrolls

Batch = Any  # of one gradient step: unrolls, or whatever else the algorithm makes of them
Forward = Callable[[ModelInput, Tensor], tuple[ModelOutput, Tensor]]  # the model


class Loss(NamedTuple):
    """The result of one forward pass. Everything is a mean over the valid transitions, so that ranks can average it."""

    total: Tensor  # []  what is minimised
    report: dict[str, Tensor]  # [] each  what people see of it, by name; names are [a-z0-9_]+ and always the same
    priority: Tensor | None = None  # [B]  the new priority of each unroll, if the batch is unrolls of the store


class Algorithm(Protocol):
    """`YourAlgorithm(config, actions, model, **options)` builds one; `config` is the AlgorithmConfig.

    It may also have `networks` (see `networks_of`), `signs` (see signs.py), and `initial_priority(recorded)`: the
    priorities [B] of finished unrolls for `store.select=priority`, by the values that inference computed. The server
    thread calls that one, so it must not change anything. All else is owned by the learner thread.
    """

    overlap: int  # rows that consecutive unrolls of a slot share; 1 is enough to bootstrap from the last one

    def batches(self, unrolls: Unrolls) -> Iterator[Batch]:
        """Yield the batches of the gradient steps that one train batch is worth."""
        ...

    def valid(self, batch: Batch) -> Tensor:
        """Return which transitions, as bool, the loss of a batch is a mean over."""
        ...

    def loss(self, batch: Batch, forward: Forward, fraction: float) -> Loss:
        """Return the loss of a batch; `fraction` is how much of the run is over, for schedules."""
        ...

    def stepped(self, loss: Loss) -> None:
        """Update what follows a gradient step, such as a target network. `loss` is the mean over all ranks."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint has to hold besides the model and the optimiser."""
        ...

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        ...


def networks_of(algorithm: Algorithm) -> nn.Module:
    """Return the networks that an algorithm trains besides the model, such as critics; an empty module if it has none.

    They are an attribute `networks`. The learner optimises, saves and restores them like the model; they are never
    published, and no process but the learner ever has them.
    """
    networks: nn.Module = getattr(algorithm, "networks", nn.Module())
    return networks
