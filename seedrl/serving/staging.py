"""Moves a batch from the host to the device: what is known of its rows, and their observations. Knows no policy.

An observation goes from the message it came in straight into the store; the policy reads it back from there by index,
stacked with the frames before it, exactly as training will.

An accelerator meets only a few sizes of batches (`buckets`), and all batches of one size at the same addresses. The
rows that are missing are those of the spare slot: they repeat the last observation, which is surely a valid one, and
what is made of them goes to the spare entry of the store.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seedrl.actions import Actions
from seedrl.columns import Columns, RowIndices
from seedrl.device import Staging, is_accelerator, packed_bytes, upload
from seedrl.rows import RESET
from seedrl.serving.seats import Seats
from seedrl.serving.sessions import Request
from seedrl.serving.slots import Indices, Slots, WritePosition
from seedrl.specs import leaves, tree_map
from seedrl.types import Observation


class HostBatch(NamedTuple):
    """The rows of some requests, joined on the host; observations stay where they are."""

    slots: Indices  # [N]
    reward: NDArray[np.float32]  # [N]
    flags: NDArray[np.uint8]  # [N]

    def padded(self, size: int, slot: int) -> "HostBatch":
        """Return as many rows as `size`; those that are missing are first rows of the spare slot."""
        missing = size - len(self.slots)
        if not missing:
            return self
        return HostBatch(
            slots=np.concatenate([self.slots, np.full(missing, slot)]),
            reward=np.concatenate([self.reward, np.zeros(missing, np.float32)]),
            flags=np.concatenate([self.flags, np.full(missing, RESET, np.uint8)]),
        )


NO_ROWS = HostBatch(np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros(0, np.uint8))


class Staged(NamedTuple):
    """The small part of a batch on the device, uploaded at once."""

    at: RowIndices
    slots: Tensor  # [N]
    reward: Tensor  # [N]
    last_action: Tensor  # [N, ...]
    reset: Tensor  # [N]  bool
    exploration: Tensor  # [4, N]  temperature, epsilon, whether it explores, whether it is greedy; [4, 0] if none does
    core_entries: list[Tensor]  # see Columns.core_entries; [] without memory


class Observed(NamedTuple):
    """The observations of a batch: in the store already, or on the device and still to be written to it."""

    stacks: Observation | None  # [N, ...]
    frames: list[Tensor]  # leaves [N, ...], if there are no stacks yet


class Stager:
    """Owned by the server thread."""

    def __init__(
        self, columns: Columns, slots: Slots, seats: Seats, device: torch.device, sizes: Sequence[int] = ()
    ) -> None:
        """`sizes` are those that batches are padded to, smallest first; there are none on the CPU."""
        self._columns = columns
        self._slots = slots
        self._seats = seats
        self._device = device
        self._scatters = is_accelerator(device) and columns.are_on_device
        self.sizes = sizes
        small = frames = 0
        if sizes:
            most = NO_ROWS.padded(sizes[-1], slots.spare)
            _, arrays = self._arrays(most, WritePosition(most.slots, most.slots, most.slots))
            small = packed_bytes([[array] for array in arrays])
            frames = packed_bytes([[leaf] for leaf in columns.blank_frames(sizes[-1])])
        self._small, self._frames = Staging(device, small), Staging(device, frames)

    def stage(self, batch: HostBatch, position: WritePosition) -> Staged:
        """Upload everything that is known of a batch before it runs, but its observations."""
        columns = self._columns
        index, arrays = self._arrays(batch, position)
        there, slots, reward, last_action, reset, exploration, *core_entries = self._small.upload(*arrays)
        at = columns.rows_at(index, there if columns.are_on_device else torch.from_numpy(index))
        return Staged(at, slots, reward, last_action, reset, exploration, core_entries)

    def _arrays(self, batch: HostBatch, position: WritePosition) -> tuple[Indices, list[NDArray[Any]]]:
        """Return the indices of rows, and everything that is uploaded."""
        columns, slots = self._columns, batch.slots
        index = columns.indices(*position)
        entries = columns.core_entries(position.entry, position.t) if columns.core_size else []
        exploration = self._seats.columns(slots, is_needed=len(self.sizes) > 0)
        last_action, reset = self._slots.last_action(slots), (batch.flags & RESET) != 0
        return index, [index, slots, batch.reward, last_action, reset, exploration, *entries]

    def observe(self, requests: list[Request], at: RowIndices) -> Observed:
        """Move the observations to where the store is."""
        if self._scatters:
            parts = [leaves(request.content.observation) for request in requests]
            return self._uploaded(list(zip(*parts, strict=True)), len(at.host))
        start = 0
        for request in requests:
            self._columns.write_frames(at.frame[start : start + request.rows], request.content.observation)
            start += request.rows
        if len(requests) == 1 and self._columns.frame_stack == 1:
            (request,) = requests  # what would be read back
            return Observed(tree_map(lambda values: upload(values, self._device), request.content.observation), [])
        return Observed(self._columns.stacks(at), [])

    def observe_nothing(self, at: RowIndices) -> Observed:
        """Return observations of zeros."""
        if self._scatters:
            return self._uploaded([[leaf] for leaf in self._columns.blank_frames(len(at.host))], len(at.host))
        return Observed(tree_map(torch.zeros_like, self._columns.stacks(at)), [])

    def _uploaded(self, columns: Sequence[Sequence[NDArray[Any]]], rows: int) -> Observed:
        missing = rows - sum(len(part) for part in columns[0])
        if missing:
            columns = [[*parts, np.repeat(parts[-1][-1:], missing, axis=0)] for parts in columns]
        return Observed(None, self._frames.upload_joined(columns))


class Noise:
    """Drawn for many rows at once: a device is asked for random numbers now and then, not every batch."""

    def __init__(
        self, actions: Actions, generator: torch.Generator, sizes: Sequence[int] = (), stock: int = 4096
    ) -> None:
        """With `sizes` noise is always at the same place."""
        self._actions = actions
        self._generator = generator
        self._stock = stock  # rows
        self._rest = torch.empty(0, 0)
        self._place = torch.zeros(sizes[-1] if sizes else 0, actions.noise_size, device=generator.device)

    def draw(self, rows: int) -> Tensor:
        """[rows, ...], as `Actions.choose` needs it."""
        if len(self._rest) < rows:
            self._rest = self._actions.noise(max(rows, self._stock), self._generator)
        noise, self._rest = self._rest[:rows], self._rest[rows:]
        return noise

    def draw_padded(self, rows: int, size: int) -> Tensor:
        """[size, ...], at the place for it if there is one; what is beyond `rows` is old."""
        noise = self.draw(rows)
        if not len(self._place):
            return noise
        self._place[:rows].copy_(noise)
        return self._place[:size]

    def none(self, size: int) -> Tensor:
        """[size, ...], without drawing any."""
        return self._place[:size] if len(self._place) else self._place.new_zeros(size, self._actions.noise_size)


def join(requests: list[Request]) -> HostBatch:
    """Return the rows of all requests, in their order."""
    if len(requests) == 1:
        (request,) = requests
        return HostBatch(request.slots, request.content.reward, request.content.flags)
    contents = [request.content for request in requests]
    return HostBatch(
        slots=np.concatenate([request.slots for request in requests]),
        reward=np.concatenate([rows.reward for rows in contents]),
        flags=np.concatenate([rows.flags for rows in contents]),
    )
