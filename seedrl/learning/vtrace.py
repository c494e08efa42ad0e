"""V-trace targets (Espeholt et al. 2018, arXiv:1802.01561). Pure; knows nothing of models or episodes."""

from typing import NamedTuple

import torch
from torch import Tensor


class VTrace(NamedTuple):
    vs: Tensor  # [T, B]  value targets
    pg_advantage: Tensor  # [T, B]  what to weigh the policy gradient with


@torch.no_grad()
def vtrace(
    *,
    log_rho_t: Tensor,  # [T, B]  log of target over behavior probability of a_t
    reward_tp1: Tensor,  # [T, B]  for the transition t → t+1
    discount_tp1: Tensor,  # [T, B]  0 where x_{t+1} is terminal
    value: Tensor,  # [T+1, B]  V(x_0) … V(x_T)
    valid_t: Tensor,  # [T, B]  false where t → t+1 is no transition of the environment
    rho_bar: float,
    c_bar: float,
    pg_rho_bar: float,
    trace_lambda: float,
) -> VTrace:
    """Equation 1 in its recursive form (remark 1), and the advantage of section 4.2.

        vs_t - V_t = delta_t + gamma_{t+1} c_t (vs_{t+1} - V_{t+1})
        delta_t = rho_t (r_{t+1} + gamma_{t+1} V_{t+1} - V_t)

    A row that is not valid contributes nothing: its target is its own value, so a transition that leads to it
    bootstraps from exactly that value, and no trace crosses it.
    """
    valid = valid_t.to(value.dtype)
    rho = log_rho_t.exp()
    clipped_rho = rho.clamp(max=rho_bar) * valid
    c = trace_lambda * rho.clamp(max=c_bar) * valid
    delta = clipped_rho * (reward_tp1 + discount_tp1 * value[1:] - value[:-1])

    excess = torch.zeros_like(value)  # vs_t - V_t; zero at t = T, where the unroll bootstraps from V_T
    for t in reversed(range(len(delta))):
        excess[t] = delta[t] + discount_tp1[t] * c[t] * excess[t + 1]
    vs = value + excess

    pg_rho = rho.clamp(max=pg_rho_bar) * valid
    pg_advantage = pg_rho * (reward_tp1 + discount_tp1 * vs[1:] - value[:-1])
    return VTrace(vs[:-1], pg_advantage)
