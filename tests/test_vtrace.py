"""V-trace against a slow transcription of the paper, and in the cases one can do by hand."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from seedrl.algorithms.vtrace import VTrace, vtrace

Array = NDArray[np.float64]


def paper_vtrace(
    rho: Array, reward: Array, gamma: Array, value: Array, *, rho_bar: float, c_bar: float, trace_lambda: float
) -> Array:
    """Equation 1 of arXiv:1802.01561 as printed, for one environment:

    vs_s = V(x_s) + sum_t (prod_{i=s}^{t-1} gamma_i c_i) rho_t (r_t + gamma_t V(x_{t+1}) - V(x_t))
    """
    n = len(rho)
    vs = np.array(value)
    for s in range(n):
        for t in range(s, n):
            trace = 1.0
            for i in range(s, t):
                trace *= gamma[i] * trace_lambda * min(c_bar, rho[i])
            vs[s] += trace * min(rho_bar, rho[t]) * (reward[t] + gamma[t] * value[t + 1] - value[t])
    return vs


def expected_vtrace(case: dict[str, Array], clips: dict[str, float]) -> tuple[Array, Array]:
    """The targets and advantages of a batch: each unroll is cut at its invalid rows, each piece is one of the paper."""
    log_rho, reward, gamma, value, valid = (case[name] for name in ("log_rho", "reward", "gamma", "value", "valid"))
    length, batch = log_rho.shape
    vs, advantage = value.copy(), np.zeros_like(log_rho)
    clip = {name: clips[name] for name in ("rho_bar", "c_bar", "trace_lambda")}
    for b in range(batch):
        ends = [-1, *np.flatnonzero(valid[:, b] == 0), length]
        for before, end in pairwise(ends):
            piece = slice(before + 1, end)
            rho = np.exp(log_rho[piece, b])
            targets = paper_vtrace(rho, reward[piece, b], gamma[piece, b], value[before + 1 : end + 1, b], **clip)
            vs[before + 1 : end + 1, b] = targets
            for k in range(len(rho)):
                t = before + 1 + k
                bootstrap = reward[t, b] + gamma[t, b] * targets[k + 1]
                advantage[t, b] = min(clips["pg_rho_bar"], rho[k]) * (bootstrap - value[t, b])
    return vs[:-1], advantage


def random_case(seed: int, length: int, batch: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    shape = (length, batch)
    return {
        "log_rho": random.normal(scale=1.5, size=shape),
        "reward": random.normal(size=shape),
        "gamma": random.choice([0.0, 0.9, 0.99, 1.0], size=shape),
        "value": random.normal(scale=3, size=(length + 1, batch)),
        "valid": (random.random(shape) < 0.8).astype(np.float64),
    }


def run(case: dict[str, Any], **clips: float) -> VTrace:
    tensors = {name: torch.as_tensor(array) for name, array in case.items()}
    return vtrace(
        log_rho_t=tensors["log_rho"],
        reward_tp1=tensors["reward"],
        discount_tp1=tensors["gamma"],
        value=tensors["value"],
        valid_t=tensors["valid"].bool(),
        **{"rho_bar": 1.0, "c_bar": 1.0, "pg_rho_bar": 1.0, "trace_lambda": 1.0, **clips},
    )


clip = st.floats(0.1, 4.0)


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(1, 9),
    batch=st.integers(1, 3),
    rho_bar=clip,
    c_bar=clip,
    pg_rho_bar=clip,
    trace_lambda=st.floats(0.0, 1.0),
)
def test_vtrace_random_cases_equal_the_sum_of_the_paper(seed: int, length: int, batch: int, **clips: float) -> None:
    case = random_case(seed, length, batch)
    vs, advantage = expected_vtrace(case, clips)
    actual = run(case, **clips)
    np.testing.assert_allclose(actual.vs, vs, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(actual.pg_advantage, advantage, rtol=1e-9, atol=1e-9)


def on_policy(length: int = 6) -> dict[str, Array]:
    case = random_case(seed=3, length=length, batch=2)
    return {**case, "log_rho": np.zeros((length, 2)), "valid": np.ones((length, 2)), "gamma": np.full((length, 2), 0.9)}


def test_vtrace_on_policy_is_the_n_step_bellman_target() -> None:
    case = on_policy()
    expected = case["value"][-1]
    targets = []
    for reward in reversed(case["reward"]):
        expected = reward + 0.9 * expected
        targets.append(expected)
    np.testing.assert_allclose(run(case).vs, targets[::-1], rtol=1e-12)


def test_vtrace_on_policy_lambda_zero_is_the_one_step_target() -> None:
    case = on_policy()
    one_step = case["reward"] + 0.9 * case["value"][1:]
    np.testing.assert_allclose(run(case, trace_lambda=0.0).vs, one_step, rtol=1e-12)


def test_vtrace_single_transition_corrects_by_the_clipped_ratio() -> None:
    case = {
        "log_rho": np.log([[0.5, 3.0]]),
        "reward": np.array([[1.0, 1.0]]),
        "gamma": np.array([[0.5, 0.5]]),
        "value": np.array([[2.0, 2.0], [4.0, 4.0]]),
        "valid": np.ones((1, 2)),
    }
    result = run(case, rho_bar=2.0, pg_rho_bar=1.5)  # the error is 1 + 0.5 * 4 - 2 = 1
    np.testing.assert_allclose(result.vs, [[2 + 0.5, 2 + 2.0]], rtol=1e-12)
    np.testing.assert_allclose(result.pg_advantage, [[0.5, 1.5]], rtol=1e-12)


def test_vtrace_zero_discount_ignores_everything_after_it() -> None:
    case = on_policy()
    case["gamma"][2] = 0
    changed = {**case, "value": case["value"].copy(), "reward": case["reward"].copy()}
    changed["value"][3:] += 100
    changed["reward"][3:] -= 100
    np.testing.assert_array_equal(run(case).vs[:3], run(changed).vs[:3])
    np.testing.assert_allclose(run(case).vs[2], case["reward"][2], rtol=1e-12)


def test_vtrace_invalid_row_has_its_own_value_and_no_advantage() -> None:
    case = on_policy()
    case["valid"][2] = 0
    result = run(case)
    np.testing.assert_array_equal(result.vs[2], case["value"][2])
    np.testing.assert_array_equal(result.pg_advantage[2], [0, 0])


def test_vtrace_invalid_row_cuts_the_trace_and_is_bootstrapped_from() -> None:
    case = on_policy()
    case["valid"][2] = 0
    changed = {**case, "value": case["value"].copy(), "reward": case["reward"].copy()}
    changed["value"][3:] += 100
    changed["reward"][2:] -= 100
    np.testing.assert_array_equal(run(case).vs[:3], run(changed).vs[:3])
    expected = case["reward"][1] + 0.9 * case["value"][2]
    np.testing.assert_allclose(run(case).vs[1], expected, rtol=1e-12)


@pytest.mark.parametrize("log_rho", [-200.0, 200.0])
def test_vtrace_extreme_ratios_stay_finite(log_rho: float) -> None:
    case = random_case(seed=1, length=4, batch=2)
    result = run({**case, "log_rho": np.full((4, 2), log_rho, np.float32), "value": case["value"].astype(np.float32)})
    assert torch.isfinite(result.vs).all()
    assert torch.isfinite(result.pg_advantage).all()


def test_vtrace_targets_carry_no_gradient() -> None:
    value = torch.zeros(3, 1, requires_grad=True)
    row = torch.ones(2, 1)
    result = run({"log_rho": row, "reward": row, "gamma": row, "value": value, "valid": row})
    assert not result.vs.requires_grad
    assert not result.pg_advantage.requires_grad
