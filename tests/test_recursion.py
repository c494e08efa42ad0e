"""Tests of sums over the future: the loop and the scan against the sum written out."""

import numpy as np
import pytest
import torch

from seedrl.algorithms.recursion import decayed_sums, looped, scanned


def written_out(term: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """Return sum over k of term_k times the decays from t up to k, for every t."""
    rows = len(term)
    sums = np.zeros((rows + 1, *term.shape[1:]))
    for t in range(rows):
        sums[t] = sum(term[k] * decay[t:k].prod(axis=0) for k in range(t, rows))
    return sums


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 20, 33])
def test_loop_and_scan_are_the_sum_written_out(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    term = torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    decay = torch.rand(rows, 3, generator=generator, dtype=torch.float64)
    decay[torch.rand(rows, 3, generator=generator) < 0.2] = 0.0  # ends
    expected = torch.from_numpy(written_out(term.numpy(), decay.numpy()))
    torch.testing.assert_close(looped(term, decay), expected)
    torch.testing.assert_close(scanned(term, decay), expected)


def test_sums_on_the_cpu_are_the_loop_to_the_bit() -> None:
    term, decay = torch.randn(20, 4), torch.rand(20, 4)
    assert torch.equal(decayed_sums(term, decay), looped(term, decay))
