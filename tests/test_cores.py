"""Tests of the recurrent cores: whole unrolls at once against a loop over their cells, which is the oracle."""

import pytest
import torch
from torch import Tensor, nn

from seedrl.models.cores import GruCore, LstmCore, rows_of

Core = LstmCore | GruCore
KINDS = pytest.mark.parametrize("kind", [LstmCore, GruCore])
ROWS, BATCH, INPUTS, UNITS = 9, 4, 5, 6


def state_size(core: Core) -> int:
    return 2 * UNITS if isinstance(core, LstmCore) else UNITS


def by_row(core: Core, features: Tensor, reset: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the cell row by row and fill the state with zeros before every reset row."""
    outputs = []
    for feature, reset_t in zip(features, reset, strict=True):
        state = state.masked_fill(reset_t.unsqueeze(-1), 0)
        if isinstance(core, LstmCore):
            output, cell = core.cell(feature, state.chunk(2, dim=-1))
            state = torch.cat([output, cell], dim=-1)
        else:
            output = state = core.cell(feature, state)
        outputs.append(output)
    return torch.stack(outputs), state


def resets(kind: str) -> Tensor:
    """Return where episodes begin [ROWS, BATCH]."""
    reset = torch.zeros(ROWS, BATCH, dtype=torch.bool)
    if kind == "first":
        reset[0] = True
    elif kind == "last":
        reset[-1, 1] = True
    elif kind == "every":
        reset[:] = True
    elif kind == "some":
        reset[0, 0] = reset[3, 0] = reset[4, 0] = reset[8, 0] = reset[5, 2] = True
    return reset


def results(core: Core, is_by_row: bool, reset: Tensor) -> list[Tensor]:
    """Return outputs, state and all gradients of a function of both."""
    torch.manual_seed(1)
    features = torch.randn(ROWS, BATCH, INPUTS, requires_grad=True)
    state = torch.randn(BATCH, state_size(core), requires_grad=True)
    weight = torch.randn(ROWS, BATCH, UNITS)
    core.zero_grad()
    outputs, last = by_row(core, features, reset, state) if is_by_row else core(features, reset, state)
    ((outputs * weight).sum() + last.square().sum()).backward()
    gradients = [each.grad for each in (features, state, *core.parameters())]
    return [outputs, last, *(each for each in gradients if each is not None)]


@KINDS
@pytest.mark.parametrize("where", ["none", "first", "last", "every", "some"])
def test_core_over_an_unroll_equals_its_cell_row_by_row_gradients_included(kind: type[Core], where: str) -> None:
    torch.manual_seed(0)
    core, reset = kind(INPUTS, UNITS), resets(where)
    at_once, expected = results(core, False, reset), results(core, True, reset)
    assert len(at_once) == len(expected) == 8
    for mine, other in zip(at_once, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@KINDS
def test_core_reset_in_the_middle_lets_no_gradient_and_no_huge_state_pass(kind: type[Core]) -> None:
    torch.manual_seed(0)
    core, reset = kind(INPUTS, UNITS), torch.zeros(ROWS, 1, dtype=torch.bool)
    reset[4] = True
    before = torch.full((4, 1, INPUTS), 100.0, requires_grad=True)
    after = torch.randn(ROWS - 4, 1, INPUTS)
    outputs, last = core(torch.cat([before, after]), reset, torch.full((1, state_size(core)), 1e3))
    alone, expected = by_row(core, after, reset[4:], torch.zeros(1, state_size(core)))
    torch.testing.assert_close((outputs[4:], last), (alone, expected), rtol=1e-4, atol=1e-6)
    outputs[4:].sum().backward()
    assert before.grad is not None
    assert not before.grad.any()


@KINDS
def test_core_of_one_row_is_its_cell_to_the_bit(kind: type[Core]) -> None:
    core, reset = kind(INPUTS, UNITS), resets("some")[:1]
    features, state = torch.randn(1, BATCH, INPUTS), torch.randn(BATCH, state_size(core))
    assert all(map(torch.equal, core(features, reset, state), by_row(core, features, reset, state)))


@KINDS
def test_core_parameters_have_the_names_of_earlier_checkpoints(kind: type[Core]) -> None:
    cell: nn.Module = kind(INPUTS, UNITS)
    assert list(cell.state_dict()) == [f"cell.{name}" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]


def test_rows_of_inserts_one_blank_row_before_every_reset_but_the_first() -> None:
    rows = rows_of(torch.tensor([[True, False], [True, False], [False, True], [True, False]]))
    assert rows is not None
    assert rows.length == 6
    assert rows.place.view(4, 2).tolist() == [[0, 1], [4, 3], [6, 7], [10, 9]]
    assert rows.is_blank.view(6, 2).tolist() == [[0, 0], [1, 0], [0, 1], [0, 0], [1, 0], [0, 0]]
    assert rows.is_over.view(6, 2).tolist() == [[0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 1]]
    assert rows_of(torch.tensor([[True, True], [False, False]])) is None
