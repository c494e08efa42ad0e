"""Moves a batch from the host to the device: what is known of its rows, and their observations. Knows no policy.

An observation goes from the message it came in straight into the store; the policy reads it back from there by index,
stacked with the frames before it, exactly as training will.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seedrl.actions import Actions
from seedrl.columns import Columns, RowIndices
from seedrl.device import Staging, is_accelerator, upload
from seedrl.serving.seats import Seats
from seedrl.serving.sessions import Request
from seedrl.serving.slots import Indices, WritePosition
from seedrl.specs import tree_map
from seedrl.types import Observation


class HostBatch(NamedTuple):
    """The rows of some requests, joined on the host; observations stay where they are."""

    slots: Indices  # [N]
    reward: NDArray[np.float32]  # [N]
    flags: NDArray[np.uint8]  # [N]


class Staged(NamedTuple):
    """The small part of a batch on the device, uploaded at once."""

    at: RowIndices
    slots: Tensor  # [N]
    reward: Tensor  # [N]
    last_action: Tensor  # [N, ...]
    reset: Tensor  # [N]  bool
    exploration: Tensor  # [4, N]  temperature, epsilon, whether it explores, whether it is greedy; [4, 0] if none does
    core_places: list[Tensor]  # see Columns.core_places


class Stager:
    """Owned by the server thread."""

    def __init__(self, columns: Columns, seats: Seats, device: torch.device) -> None:
        self._columns = columns
        self._seats = seats
        self._device = device
        self._small, self._frames = Staging(device), Staging(device)

    def stage(
        self, batch: HostBatch, reset: NDArray[np.bool_], position: WritePosition, last_action: NDArray[Any]
    ) -> Staged:
        """Upload everything that is known of a batch before it runs, but its observations."""
        columns, seats = self._columns, self._seats
        index = columns.indices(*position)
        places = columns.core_places(position.entry, position.t) if columns.core_size else []
        there, slots, reward, action_before, is_reset, exploration, *core_places = self._small.upload(
            index, batch.slots, batch.reward, last_action, reset, seats.columns(batch.slots), *places
        )
        at = columns.rows_at(index, there if columns.are_on_device else torch.from_numpy(index))
        return Staged(at, slots, reward, action_before, is_reset, exploration, core_places)

    def observe(self, requests: list[Request], at: RowIndices) -> Observation:
        """Move the observations into the store; return them stacked [N, ...]."""
        if is_accelerator(self._device) and self._columns.are_on_device:
            observations = [request.content.observation for request in requests]
            joined = self._columns.upload_frames(at.frame, observations, self._frames)
            return joined if self._columns.frame_stack == 1 else self._columns.stacks(at)
        start = 0
        for request in requests:
            self._columns.write_frames(at.frame[start : start + request.rows], request.content.observation)
            start += request.rows
        if len(requests) == 1 and self._columns.frame_stack == 1:
            (request,) = requests  # what would be read back
            return tree_map(lambda values: upload(values, self._device), request.content.observation)
        return self._columns.stacks(at)

    def stacks(self, at: RowIndices) -> Observation:
        """Return what the store has at some rows, stacked [N, ...]."""
        return self._columns.stacks(at)


class Noise:
    """Drawn for many rows at once: a device is asked for random numbers now and then, not every batch."""

    def __init__(self, actions: Actions, generator: torch.Generator, stock: int = 4096) -> None:
        self._actions = actions
        self._generator = generator
        self._stock = stock  # rows
        self._rest = torch.empty(0, 0)

    def draw(self, rows: int) -> Tensor:
        """[rows, ...], as `Actions.choose` needs it."""
        if len(self._rest) < rows:
            self._rest = self._actions.noise(max(rows, self._stock), self._generator)
        noise, self._rest = self._rest[:rows], self._rest[rows:]
        return noise


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
