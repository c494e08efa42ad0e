"""The recurrent cores. Know nothing of encoders, heads or where resets come from.

A state restarts from zeros at every reset row. Row by row that is a matter of filling, but an LSTM that runs through
all rows by itself cannot be interrupted. So a *blank* row is inserted before every reset row. It has an input of its
own, 0 in all other rows, with weights so large that they close the gates through which the old state would pass: after
a blank row the state is exactly zero, and no gradient passes it. Columns with fewer resets end with rows that keep the
state.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

SHUT = 1e4  # a gate that gets minus this is 0, one that gets this is 1, whatever else it gets


class Rows(NamedTuple):
    """The places of the rows [T, B] of unrolls among rows [L, B] that have blank ones before the resets."""

    length: int  # L
    place: Tensor  # [T * B]  of the flattened rows
    is_blank: Tensor  # [L * B]  float, 1 where the state becomes zero
    is_over: Tensor  # [L * B]  float, 1 after the last row of a column


def rows_of(reset: Tensor) -> Rows | None:
    """Return the rows for resets [T, B]; None if no reset follows the first row, so that no blank row is needed."""
    later = reset.cpu().clone()
    later[0] = False  # the first state is filled
    if not later.any():
        return None
    (rows, batch), blanks = later.shape, later.cumsum(0)
    length = rows + int(blanks[-1].max())
    place = (torch.arange(rows).unsqueeze(1) + blanks) * batch + torch.arange(batch)
    ends = torch.arange(length).unsqueeze(1) > place[-1] // batch
    is_blank = (~ends).float().flatten().index_fill(0, place.flatten(), 0.0)
    device = reset.device
    return Rows(length, place.flatten().to(device), is_blank.to(device), ends.float().flatten().to(device))


def _spread(features: Tensor, rows: Rows, *flags: Tensor) -> Tensor:
    """Return features [T, B, F] at their places among [L, B, F + flags], where blank rows are zero."""
    batch, size = features.shape[1:]
    spread = features.new_zeros(rows.length * batch, size).index_copy(0, rows.place, features.flatten(0, 1))
    return torch.cat([spread, torch.stack(flags, dim=-1)], dim=-1).view(rows.length, batch, -1)


def _gathered(outputs: Tensor, rows: Rows, like: Tensor) -> Tensor:
    """Return the outputs [T, B, U] of rows that are not blank."""
    return outputs.flatten(0, 1).index_select(0, rows.place).view(*like.shape[:2], -1)


class LstmCore(nn.Module):
    """An LSTM over time. Its state is one vector [B, 2 * units] and restarts from zeros at every reset row."""

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(inputs, units)
        with torch.no_grad():
            nn.init.orthogonal_(self.cell.weight_ih, gain=math.sqrt(2))
            nn.init.orthogonal_(self.cell.weight_hh)
            self.cell.bias_ih[units : 2 * units] = (
                1.0  # the forget gate: with 0 the state would be halved in every step
            )

    def forward(self, features: Tensor, reset: Tensor, core_state: Tensor) -> tuple[Tensor, Tensor]:
        # Filled rather than multiplied by zero, which would keep a NaN for ever.
        hidden, cell = core_state.masked_fill(reset[0].unsqueeze(-1), 0).chunk(2, dim=-1)
        if len(features) == 1:
            hidden, cell = self.cell(features[0], (hidden, cell))
            return hidden.unsqueeze(0), torch.cat([hidden, cell], dim=-1)
        rows = rows_of(reset)
        if rows is None:
            outputs, hidden, cell = self._run(features, self.cell.weight_ih, hidden, cell)
            return outputs, torch.cat([hidden, cell], dim=-1)
        spread = _spread(features, rows, rows.is_blank, rows.is_over)
        outputs, _, cell = self._run(spread, self._weights_with_flags(), hidden, cell)
        outputs = _gathered(outputs, rows, features)
        return outputs, torch.cat([outputs[-1], cell], dim=-1)

    def _weights_with_flags(self) -> Tensor:
        """Return the weights of the inputs and of both flags: a blank row forgets everything, the last ones nothing."""
        shut = self.cell.weight_ih.new_zeros(4, self.cell.hidden_size, 2)  # the gates are input, forget, cell, output
        shut[0], shut[1, :, 0], shut[1, :, 1] = -SHUT, -SHUT, SHUT
        return torch.cat([self.cell.weight_ih, shut.flatten(0, 1)], dim=1)

    def _run(self, features: Tensor, weight_ih: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run all rows at once; return the outputs and the last state."""
        state, own = (hidden.unsqueeze(0), cell.unsqueeze(0)), self.cell
        weights = [weight_ih, own.weight_hh, own.bias_ih, own.bias_hh]
        outputs, hidden, cell = torch.lstm(
            features, state, weights, True, 1, 0.0, torch.is_grad_enabled(), False, False
        )
        return outputs, hidden.squeeze(0), cell.squeeze(0)


class GruCore(nn.Module):
    """A GRU over time. Its state is one vector [B, units] and restarts from zeros at every reset row.

    It runs row by row: on the CPU torch's GRU over all rows takes as long as the loop.
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(inputs, units)

    def forward(self, features: Tensor, reset: Tensor, core_state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for feature, reset_t in zip(features, reset.unsqueeze(-1), strict=True):
            core_state = self.cell(feature, core_state.masked_fill(reset_t, 0))
            outputs.append(core_state)
        return torch.stack(outputs), core_state
