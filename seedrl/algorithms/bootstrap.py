"""The parts that learning from replay needs: n-step returns, priorities, and a network that follows another slowly.

Knows nothing of losses or of where unrolls come from.
"""

import copy

import torch
from torch import Tensor, nn


@torch.no_grad()
def n_step(
    *,
    reward_tp1: Tensor,  # [T, B]  for the transition t → t+1
    discount_tp1: Tensor,  # [T, B]  0 where x_{t+1} is terminal
    value: Tensor,  # [T+1, B]  what to bootstrap from
    valid_t: Tensor,  # [T, B]  false where t → t+1 is no transition of the environment
    steps: int,
) -> Tensor:
    """Return the n-step returns [T, B].

        G_t^(n) = r_{t+1} + gamma_{t+1} G_{t+1}^(n-1),  where G_t^(0) is the value of x_t

    A return is shorter where fewer than n transitions follow: it bootstraps from the last row of the unroll, or from
    the true final observation of an episode that was truncated, whose row is not valid. None crosses an end. The return
    of a row that is not valid means nothing.
    """
    following = value
    for _ in range(steps):
        sooner = torch.where(valid_t, reward_tp1 + discount_tp1 * following[1:], value[:-1])
        following = torch.cat([sooner, value[-1:]])
    return following[:-1]


def priority_of(error: Tensor, valid: Tensor, eta: float) -> Tensor:
    """Return the priority [B] of unrolls by their absolute errors [T, B], which are 0 where they are not valid.

    It is eta max + (1 - eta) mean (Kapturowski et al. 2019, section 2.3), and 0 for an unroll without any transition.
    """
    return eta * error.amax(dim=0) + (1 - eta) * error.sum(dim=0) / valid.sum(dim=0).clamp(min=1)


class TargetNetwork:
    """A copy of a network that is not trained and changes only by `follow`. Owned by the learner thread."""

    def __init__(self, network: nn.Module) -> None:
        self._source = network
        self.network = copy.deepcopy(network).requires_grad_(False)

    @torch.no_grad()
    def follow(self, share: float = 1.0) -> None:
        """Move the weights by this share of the way to those of the source; buffers become those of the source."""
        torch._foreach_lerp_(list(self.network.parameters()), list(self._source.parameters()), share)
        for own, new in zip(self.network.buffers(), self._source.buffers(), strict=True):
            own.copy_(new)

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint has to hold."""
        return {f"target.{name}": tensor for name, tensor in self.network.state_dict().items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned."""
        self.network.load_state_dict({name: tensors[f"target.{name}"] for name in self.network.state_dict()})
