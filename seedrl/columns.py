"""The memory of the store: the rows of unrolls, column by column. Knows nothing of who owns which entry.

An *entry* is room for one unroll: T+1 rows, the core_state before row 0, and the frames of those rows preceded by the
frame_stack-1 frames that the stack of row 0 reaches back to. Frames are stored once; `stacks` rebuilds what the policy
saw, by index, for inference and training alike.

What the device makes or needs at every step (frames, logits, values, core_state) is on the device and stays there. What
the host knows anyway (rewards, flags, actions) is kept on the host and uploaded with the train batch: a few bytes per
row, and no kernel for them at every step. With another `memory` than the device, for rings that are too large for it,
the former is there, and copied whenever the device needs it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seedrl.actions import Actions
from seedrl.device import Staging, upload
from seedrl.rows import RESET, TERMINATED, TRUNCATED
from seedrl.specs import Arrays, ArraySpec, EnvSpec, as_tree, leaves, names, tree_map
from seedrl.types import ModelInput, ModelOutput, Observation, Recorded, Ticket, Unrolls, stack_frames

Indices = NDArray[np.int64]


class RowIndices(NamedTuple):
    """The places of some rows in the columns."""

    host: Indices  # [N]
    row: Tensor  # [N]  the same, where the columns are
    frame: Tensor  # [N]  the newest frame of each
    stack: Tensor  # [N * frame_stack]  all frames of each, oldest first


class Record(NamedTuple):
    """The values of some rows that the host knows."""

    reward: NDArray[np.float32]  # [N]
    flags: NDArray[np.uint8]  # [N]
    age: Indices  # [N]  rows since the episode began, at most frame_stack - 1
    last_action: NDArray[Any]  # [N, ...]
    action: NDArray[Any]  # [N, ...]
    policy_version: Indices  # [N], or [] for all alike: of the weights that chose the action


class Columns:
    """Not locked: the store ensures that no entry belongs to two threads at a time."""

    def __init__(
        self,
        spec: EnvSpec,
        entries: int,
        unroll_length: int,
        frame_stack: int,
        core_size: int,
        overlap: int,
        device: torch.device,
        memory: torch.device | None = None,
    ) -> None:
        """`memory` is where rows are kept; the device, if it is not given."""
        memory = memory or device
        self.rows = unroll_length + 1  # of an unroll
        self.spare = entries - 1  # an entry for what nobody needs: no slot writes it, and no unroll is read from it
        self.frame_stack = frame_stack
        self.core_size = core_size
        self.overlap = overlap  # rows that consecutive unrolls of a slot share
        self._frame_rows = frame_stack - 1 + self.rows
        self._device, self._memory = device, memory
        self._frames = tree_map(
            lambda leaf: Frames(leaf, entries * self._frame_rows, frame_stack, memory), spec.observation
        )
        self._logits = torch.zeros(entries * self.rows, spec.policy_size, device=memory)
        self._value = torch.zeros(entries * self.rows, device=memory)
        self._core_state = torch.zeros(entries, core_size, device=memory)
        self._next_core_state = torch.zeros(entries, core_size, device=memory)  # before the first row that is shared
        self._host = _zeros(Actions(spec), entries * self.rows)
        self._back = np.arange(frame_stack - 1, -1, -1)  # oldest frame first
        self._rolling = Staging(memory)  # owned by the thread that writes
        self._gathering = Staging(device)  # owned by the thread that reads

    @property
    def unroll_length(self) -> int:
        return self.rows - 1

    @property
    def nbytes(self) -> int:
        """Return the bytes they take in their memory, which is the device's unless another was given."""
        columns = (self._logits, self._value, self._core_state, self._next_core_state)
        return sum(leaf.nbytes for leaf in leaves(self._frames)) + sum(column.nbytes for column in columns)

    @property
    def host_nbytes(self) -> int:
        """Return the bytes they take on the host besides."""
        return sum(column.nbytes for column in self._host)

    @property
    def are_on_device(self) -> bool:
        return self._memory == self._device

    def locate(self, entry: Indices, t: Indices, age: Indices) -> RowIndices:
        """Return where rows t of entries are, uploaded at once; see `indices`."""
        index = self.indices(entry, t, age)
        return self.rows_at(index, upload(index, self._memory))

    def rows_at(self, index: Indices, there: Tensor) -> RowIndices:
        """Return what `indices` returned as such; `there` is the same where the columns are."""
        n = len(index) // (2 + self.frame_stack)
        return RowIndices(index[:n], there[:n], there[n : 2 * n], there[2 * n :])

    def indices(self, entry: Indices, t: Indices, age: Indices) -> Indices:
        """Return where rows t of entries are, all [N], as one array of everything that RowIndices has.

        `age` counts rows since the episode began, at most frame_stack-1: an older frame than the first of the
        episode is the first of the episode, as envpool's own stack_num has it.
        """
        n = len(entry)
        index = np.empty((2 + self.frame_stack) * n, np.int64)
        row, frame, stack = index[:n], index[n : 2 * n], index[2 * n :].reshape(n, -1)
        np.add(entry * self.rows, t, out=row)
        np.add(entry * self._frame_rows + (self.frame_stack - 1), t, out=frame)
        np.subtract(frame[:, np.newaxis], np.minimum(self._back, age[:, np.newaxis]), out=stack)
        return index

    # Written by inference, one row of each of N entries at a time.

    def write_frames(self, frame: Tensor, observation: Arrays) -> None:
        """Write observations [n, ...] at these indices [n], straight from where they arrived."""
        for column, values in zip(leaves(self._frames), leaves(observation), strict=True):
            column.write(frame, values)

    def scatter_frames(self, frame: Tensor, values: Sequence[Tensor]) -> None:
        """Write frames [n, ...], leaf by leaf, that are where the columns are."""
        for column, own in zip(leaves(self._frames), values, strict=True):
            column.scatter(frame, own)

    def as_observation(self, values: Sequence[Tensor]) -> Observation:
        """Return leaves as an observation."""
        observation: Observation = as_tree(self._frames, list(values))
        return observation

    def blank_frames(self, rows: int) -> list[NDArray[Any]]:
        """Return frames [rows, ...] of zeros, leaf by leaf."""
        return [column.blank(rows) for column in leaves(self._frames)]

    def stacks(self, at: RowIndices) -> Observation:
        """Return the stacked observations [N, frame_stack * C, ...] of these rows, on the device."""
        return tree_map(lambda column: column.stacks(at.stack).to(self._device), self._frames)

    def write_record(self, at: RowIndices, record: Record) -> None:
        """Write what the host knows."""
        columns: Sequence[NDArray[Any]] = self._host
        for column, values in zip(columns, record, strict=True):
            column[at.host] = values

    def write_output(self, at: RowIndices, output: ModelOutput) -> None:
        """Write what the model made of the rows."""
        self._logits.index_copy_(0, at.row, output.logits.to(self._memory))
        self._value.index_copy_(0, at.row, output.value.to(self._memory))

    def core_entries(self, entry: Indices, t: Indices) -> list[Indices]:
        """Return the entries [N] that keep the core_state before rows t: as their first, and as the next unroll's.

        Most rows are neither; theirs goes to the spare entry.
        """
        return [np.where(t == row, entry, self.spare) for row in (0, self.rows - self.overlap)]

    def keep_core_state(self, entries: Sequence[Tensor], core_state: Tensor) -> None:
        """Keep the core_state [N, S] where an unroll begins, and where the next one will; see `core_entries`."""
        kept = core_state.to(self._memory)
        for column, entry in zip((self._core_state, self._next_core_state), entries, strict=True):
            column.index_copy_(0, entry if self.are_on_device else entry.to(self._memory), kept)

    def roll(self, finished: Indices, fresh: Indices) -> None:
        """Begin fresh entries with the last rows of finished ones, their frames and their core_state."""
        first, shared = self.rows - self.overlap, np.arange(self.overlap)
        source, target = _spans(finished * self.rows + first, shared), _spans(fresh * self.rows, shared)
        for column in self._host:
            column[target] = column[source]
        span = np.arange(self.frame_stack - 1 + self.overlap)
        frames = _spans(finished * self._frame_rows + first, span), _spans(fresh * self._frame_rows, span)
        rows_here, rows_there, frames_here, frames_there, here, there = self._rolling.upload(
            source, target, *frames, finished, fresh
        )
        _copy([self._logits, self._value], rows_here, rows_there)
        _copy([column.words for column in leaves(self._frames)], frames_here, frames_there)
        if self._core_state.shape[1]:
            self._core_state.index_copy_(0, there, self._next_core_state.index_select(0, here))

    # Whole unrolls, for checkpoints and recordings.

    def read(self, entry: Indices) -> dict[str, Tensor]:
        """Return everything that finished entries [N] hold, by name, on the host; frames are not stacked."""
        here = upload(entry, self._memory)
        in_memory = {name: column.index_select(0, here) for name, column in self._unrolls().items()}
        rows = entry[:, np.newaxis] * self.rows + np.arange(self.rows)
        host = {name: torch.from_numpy(column[rows]) for name, column in self._host._asdict().items()}
        return {**{name: column.cpu() for name, column in in_memory.items()}, **host}

    def write(self, entry: Indices, unrolls: dict[str, Tensor]) -> None:
        """Write what `read` returned to these entries [N]."""
        there = upload(entry, self._memory)
        for name, column in self._unrolls().items():
            column.index_copy_(0, there, unrolls[name].to(self._memory))
        rows = entry[:, np.newaxis] * self.rows + np.arange(self.rows)
        for name, column in self._host._asdict().items():
            column[rows] = unrolls[name].numpy()

    def _unrolls(self) -> dict[str, Tensor]:
        """Return the columns that are tensors, with a row for each entry."""
        frames = {
            f"observation{'.' if name else ''}{name}": column.frames.unflatten(0, (-1, self._frame_rows))
            for name, column in zip(names(self._frames), leaves(self._frames), strict=True)
        }
        rows = {"behavior_logits": self._logits, "behavior_value": self._value}
        unrolls = {name: column.unflatten(0, (-1, self.rows)) for name, column in rows.items()}
        return {**frames, **unrolls, "core_state": self._core_state}

    def last_versions(self, entry: Indices) -> Indices:
        """Return the policy versions [N] of the last rows of finished entries."""
        return self._host.policy_version[entry * self.rows + self.rows - 1]

    def recorded(self, entry: Indices) -> Recorded:
        """Return what finished entries hold besides observations, time-major."""
        row = entry * self.rows + np.arange(self.rows)[:, np.newaxis]  # [T+1, N]
        index, flags = upload(row.reshape(-1), self._memory), self._host.flags[row]
        return Recorded(
            reward=upload(self._host.reward[row], self._device),
            terminated=upload((flags & TERMINATED) != 0, self._device),
            truncated=upload((flags & TRUNCATED) != 0, self._device),
            action=upload(self._host.action[row], self._device),
            behavior_logits=self._logits.index_select(0, index).view(*row.shape, -1).to(self._device),
            behavior_value=self._value.index_select(0, index).view(row.shape).to(self._device),
        )

    # Read by the learner.

    def gather(self, ticket: Ticket, weight: NDArray[np.float32]) -> Unrolls:
        """Return the unrolls of B entries, time-major, with their importance weights."""
        entry, time = ticket.entry, np.arange(self.rows)[:, np.newaxis]
        row = entry * self.rows + time  # [T+1, B]
        t = np.broadcast_to(time, row.shape)
        record = Record(*(column[row] for column in self._host))
        index = self.indices(np.broadcast_to(entry, row.shape).reshape(-1), t.reshape(-1), record.age.reshape(-1))
        flags = ((record.flags & bit) != 0 for bit in (RESET, TERMINATED, TRUNCATED))
        there, entries, reward, last_action, action, reset, terminated, truncated, weights = self._gathering.upload(
            index, entry, record.reward, record.last_action, record.action, *flags, weight
        )
        if not self.are_on_device:
            there, entries = torch.from_numpy(index), torch.from_numpy(entry)
        at = self.rows_at(index, there)

        def rows(column: Tensor) -> Tensor:
            return column.index_select(0, at.row).view(*row.shape, *column.shape[1:]).to(self._device)

        return Unrolls(
            inputs=ModelInput(
                observation=tree_map(lambda stacks: stacks.view(*row.shape, *stacks.shape[1:]), self.stacks(at)),
                reward=reward,
                last_action=last_action,
                reset=reset,
            ),
            terminated=terminated,
            truncated=truncated,
            action=action,
            behavior_logits=rows(self._logits),
            behavior_value=rows(self._value),
            core_state=self._core_state.index_select(0, entries).to(self._device),
            weight=weights,
            policy_version=record.policy_version,
            ticket=ticket,
        )


def _copy(columns: Sequence[Tensor], here: Tensor, there: Tensor) -> None:
    for column in columns:
        column.index_copy_(0, there, column.index_select(0, here))


def _zeros(actions: Actions, rows: int) -> Record:
    return Record(
        reward=np.zeros(rows, np.float32),
        flags=np.zeros(rows, np.uint8),
        age=np.zeros(rows, np.int64),
        last_action=np.zeros((rows, *actions.shape), actions.dtype),
        action=np.zeros((rows, *actions.shape), actions.dtype),
        policy_version=np.zeros(rows, np.int64),
    )


def _spans(starts: Indices, span: Indices) -> Indices:
    """Return start + span for every start, one after the other."""
    return (starts[:, np.newaxis] + span).reshape(-1)


class Frames:
    """The frames of one leaf of all observations, as rows of words."""

    def __init__(self, spec: ArraySpec, count: int, frame_stack: int, device: torch.device) -> None:
        self._spec = spec
        self._frame_stack = frame_stack
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._word = _widest_word(spec.nbytes)
        self._device = device
        self.words = torch.empty(count, spec.nbytes // self._word.itemsize, dtype=self._word, device=device)
        self._bytes = self.words.view(torch.uint8).numpy() if device.type == "cpu" else None

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    @property
    def frames(self) -> Tensor:
        """Return the memory as frames of the environment's shape and type."""
        return self.words.view(self._dtype).view(-1, *self._spec.shape)

    def blank(self, rows: int) -> NDArray[Any]:
        return np.zeros((rows, *self._spec.shape), self._spec.dtype)

    def write(self, frame: Tensor, values: NDArray[Any]) -> None:
        values = np.ascontiguousarray(values).reshape(len(values), -1)
        if self._bytes is not None:  # by numpy, which moves whole rows, from any address
            self._bytes[frame.numpy()] = values.view(np.uint8)
        else:
            self.scatter(frame, upload(values, self._device))

    def scatter(self, frame: Tensor, values: Tensor) -> None:
        """Write frames [n, ...] that are where this memory is."""
        self.words.index_copy_(0, frame, values.view(len(values), -1).view(torch.uint8).view(self._word))

    def stacks(self, stack: Tensor) -> Tensor:
        frames = self.words.index_select(0, stack).view(self._dtype)
        return stack_frames(frames.view(-1, self._frame_stack, *self._spec.shape), self._spec)


def _widest_word(nbytes: int) -> torch.dtype:
    """The widest integer that rows of this size consist of: torch moves those seven times as fast as single bytes."""
    for word in (torch.int64, torch.int32, torch.int16):
        if nbytes % word.itemsize == 0:
            return word
    return torch.uint8
