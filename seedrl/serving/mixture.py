"""One forward pass for each policy that acts in a batch. Knows nothing of why a row is a policy's."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seedrl.device import upload
from seedrl.types import ModelInput, ModelOutput

Forward = Callable[[int, ModelInput, Tensor], tuple[ModelOutput, Tensor]]  # of the policy with this number


def forward_each(
    entry: NDArray[np.int64], inputs: ModelInput, core_state: Tensor, forward: Forward
) -> tuple[ModelOutput, Tensor]:
    """Return outputs and core_state [N, ...] of rows that belong to several policies, largest share first.

    `entry` [N] has the number of the policy that acts in each row. A row gets what its policy gives if the rows of
    that policy are alone in a batch.
    """
    numbers, counts = np.unique(entry, return_counts=True)
    if len(numbers) == 1:
        return forward(int(numbers[0]), inputs, core_state)
    places, outputs = [], []
    for number in numbers[np.argsort(-counts, kind="stable")].tolist():
        at = upload(np.flatnonzero(entry == number), core_state.device)
        own = inputs.tree_map(lambda leaf, at=at: leaf.index_select(0, at))  # type: ignore[misc]
        places.append(at)
        outputs.append(forward(number, own, core_state.index_select(0, at)))
    back = torch.argsort(torch.cat(places))
    logits, value, states = (
        torch.cat(parts).index_select(0, back)
        for parts in zip(*((output.logits, output.value, state) for output, state in outputs), strict=True)
    )
    return ModelOutput(logits, value), states
