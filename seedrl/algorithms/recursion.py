"""Sums over the future, x_t = term_t + decay_t x_{t+1}. Pure; knows nothing of what they are sums of."""

import torch
from torch import Tensor

from seedrl.device import is_accelerator


@torch.no_grad()
def decayed_sums(term: Tensor, decay: Tensor) -> Tensor:
    """Return x [T+1, B] for terms and decays [T, B]; x_T is 0.

    A loop takes T kernels one after the other, which costs nothing on the CPU; an accelerator gets a scan.
    """
    return scanned(term, decay) if is_accelerator(term.device) else looped(term, decay)


def looped(term: Tensor, decay: Tensor) -> Tensor:
    """Return the sums from the last to the first."""
    sums = torch.cat([term, torch.zeros_like(term[:1])])
    for t in reversed(range(len(term))):
        sums[t] = term[t] + decay[t] * sums[t + 1]
    return sums


def scanned(term: Tensor, decay: Tensor) -> Tensor:
    """Return the sums in log2(T) rounds: after round k each has the next 2**k terms (Hillis and Steele 1986)."""
    sums, reach = term, 1
    while reach < len(term):
        sums = torch.cat([torch.addcmul(sums[:-reach], decay[: len(sums) - reach], sums[reach:]), sums[-reach:]])
        decay = decay[:-reach] * decay[reach:]
        reach *= 2
    return torch.cat([sums, torch.zeros_like(term[:1])])
