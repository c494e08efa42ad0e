"""The unrolls: the hand-off from serving to learning. Knows nothing of streams, models or losses.

One preallocated ring. An *entry* is room for one unroll: T+1 rows, the core_state before row 0, and the frames of those
rows preceded by the frame_stack-1 frames that the stack of row 0 reaches back to. Each slot always owns one entry,
which inference writes row by row; `capacity` further entries are free or hold finished unrolls.

    free ──roll──→ written by its slot ──commit──→ ready ──take──→ free

Consecutive unrolls of a slot share one row: row T of one is row 0 of the next. Frames are stored once; `stacks`
rebuilds what the policy saw, by index, for inference and training alike.

What the device makes or needs at every step (frames, logits, values, core_state) is on the device and stays there. What
the host knows anyway (rewards, flags, actions) is kept on the host and uploaded with the train batch: a few bytes per
row, and no kernel for them at every step.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seedrl.actions import Actions
from seedrl.device import after_serving, finish, upload
from seedrl.rows import RESET, TERMINATED, TRUNCATED
from seedrl.specs import Arrays, ArraySpec, EnvSpec, leaves, tree_map
from seedrl.types import ModelInput, ModelOutput, Observation, Unrolls

Indices = NDArray[np.int64]


class Place(NamedTuple):
    """Where some rows are, as indices into the store's columns."""

    host: Indices  # [N]
    row: Tensor  # [N]  the same on the device
    frame: Tensor  # [N]  the newest frame of each
    stack: Tensor  # [N * frame_stack]  all frames of each, oldest first


class Record(NamedTuple):
    """What the host knows of some rows."""

    reward: NDArray[np.float32]  # [N]
    flags: NDArray[np.uint8]  # [N]
    age: Indices  # [N]  rows since the episode began, at most frame_stack - 1
    last_action: NDArray[Any]  # [N, ...]
    action: NDArray[Any]  # [N, ...]
    policy_version: Indices  # [N], or [] for all alike: of the weights that chose the action


class Store:
    """Thread-safe between one writer (inference) and one reader (learner): no entry belongs to both at a time."""

    def __init__(
        self,
        spec: EnvSpec,
        *,
        slots: int,
        capacity: int,
        unroll_length: int,
        frame_stack: int,
        core_size: int,
        device: torch.device,
    ) -> None:
        self.unroll_length = unroll_length
        self.frame_stack = frame_stack
        self.capacity = capacity
        self.completed = 0  # unrolls committed so far; written by inference
        self.on_free: Callable[[], None] = lambda: None  # called, by whoever took or discarded, when entries are free
        self._rows = unroll_length + 1
        self._frame_rows = frame_stack - 1 + self._rows
        self._device = device
        actions = Actions(spec)
        entries = slots + capacity
        rows = entries * self._rows

        self._frames = tree_map(
            lambda leaf: Frames(leaf, entries * self._frame_rows, frame_stack, device), spec.observation
        )
        self._logits = torch.zeros(rows, spec.policy_size, device=device)
        self._value = torch.zeros(rows, device=device)
        self._core_state = torch.zeros(entries, core_size, device=device)
        self._host = Record(
            reward=np.zeros(rows, np.float32),
            flags=np.zeros(rows, np.uint8),
            age=np.zeros(rows, np.int64),
            last_action=np.zeros((rows, *actions.shape), actions.dtype),
            action=np.zeros((rows, *actions.shape), actions.dtype),
            policy_version=np.zeros(rows, np.int64),
        )
        self.slot = np.zeros(entries, np.int64)  # whose unroll an entry holds

        self._time = np.arange(self._rows)[:, np.newaxis]
        self._back = np.arange(frame_stack - 1, -1, -1)  # oldest frame first
        self._free = list(range(slots, entries))
        self._ready: deque[int] = deque()
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """On the device."""
        frames = sum(leaf.nbytes for leaf in leaves(self._frames))
        return frames + sum(column.nbytes for column in (self._logits, self._value, self._core_state))

    @classmethod
    def bytes_needed(cls, spec: EnvSpec, **sizes: int) -> int:
        """`nbytes` of a store of these sizes, without making one."""
        return cls(spec, **sizes, device=torch.device("meta")).nbytes

    @property
    def ready(self) -> int:
        """Finished unrolls waiting to be trained on."""
        return len(self._ready)

    def place(self, entry: Indices, t: Indices, age: Indices) -> Place:
        """Where rows t of entries are, all indices [N], uploaded at once.

        `age` counts rows since the episode began, at most frame_stack-1: an older frame than the first of the
        episode is the first of the episode, as envpool's own stack_num has it.
        """
        n = len(entry)
        index = np.empty((2 + self.frame_stack) * n, np.int64)
        row, frame, stack = index[:n], index[n : 2 * n], index[2 * n :].reshape(n, -1)
        np.add(entry * self._rows, t, out=row)
        np.add(entry * self._frame_rows + (self.frame_stack - 1), t, out=frame)
        np.subtract(frame[:, np.newaxis], np.minimum(self._back, age[:, np.newaxis]), out=stack)
        on_device = upload(index, self._device)
        return Place(row, on_device[:n], on_device[n : 2 * n], on_device[2 * n :])

    # Written by inference, one row of each of N entries at a time.

    def write_frames(self, frame: Tensor, observation: Arrays) -> None:
        """Observations [n, ...] at these indices [n], straight from where they arrived."""
        for column, values in zip(leaves(self._frames), leaves(observation), strict=True):
            column.write(frame, values)

    def stacks(self, place: Place) -> Observation:
        """The stacked observations [N, frame_stack * C, ...] of these rows."""
        return tree_map(lambda column: column.stacks(place.stack), self._frames)

    def write_rows(self, place: Place, record: Record, output: ModelOutput) -> None:
        """Everything but the frames; all of it [N, ...]."""
        columns: Sequence[NDArray[Any]] = self._host
        for column, values in zip(columns, record, strict=True):
            column[place.host] = values
        self._logits.index_copy_(0, place.row, output.logits)
        self._value.index_copy_(0, place.row, output.value)

    def begin(self, entry: Indices, core_state: Tensor) -> None:
        """The core_state [N, S] before row 0 of these entries."""
        if core_state.shape[1]:
            self._core_state.index_copy_(0, upload(entry, self._device), core_state)

    def reserve(self, count: int) -> Indices:
        """Up to `count` free entries."""
        with self._changed:
            # The newest first: what was read last is still in the caches.
            return np.array([self._free.pop() for _ in range(min(count, len(self._free)))], np.int64)

    def roll(self, finished: Indices, fresh: Indices) -> None:
        """Makes row T of finished entries row 0 of fresh ones, with the frames its stack reaches back to."""
        source, target = finished * self._rows + self.unroll_length, fresh * self._rows
        for column in self._host:
            column[target] = column[source]
        self._copy((self._logits, self._value), source, target)
        stack = np.arange(self.frame_stack)
        source = (finished * self._frame_rows + self.unroll_length)[:, np.newaxis] + stack
        target = (fresh * self._frame_rows)[:, np.newaxis] + stack
        self._copy([column.words for column in leaves(self._frames)], source.reshape(-1), target.reshape(-1))

    def _copy(self, columns: Sequence[Tensor], source: Indices, target: Indices) -> None:
        here, there = upload(np.stack((source, target)), self._device)
        for column in columns:
            column.index_copy_(0, there, column.index_select(0, here))

    def commit(self, entries: list[int]) -> None:
        """These unrolls are finished: the learner may train on them."""
        with self._changed:
            self._ready.extend(entries)
            self.completed += len(entries)
            self._changed.notify()

    # Read by the learner.

    def wait_for(self, count: int, timeout: float) -> bool:
        """Whether there are so many finished unrolls before the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._ready) >= count, timeout)

    def take(self, count: int, timeout: float) -> Unrolls | None:
        """The `count` oldest finished unrolls, copied out so that their entries are free again; None at the timeout."""
        with self._changed:
            if not self.wait_for(count, timeout):
                return None
            entries = [self._ready.popleft() for _ in range(count)]
        after_serving(self._device)
        unrolls = self.gather(np.array(entries, np.int64))
        finish(self._device)  # before others may write there
        with self._changed:
            self._free.extend(entries)
        self.on_free()
        return unrolls

    def blank(self, count: int) -> Unrolls:
        """Unrolls of zeros, and of ends: none of their transitions is valid."""
        like = self.gather(np.zeros(count, np.int64))
        inputs = like.inputs.tree_map(torch.zeros_like)
        ends = torch.ones_like(like.terminated)
        version = np.zeros_like(like.policy_version)
        action, logits, value, core_state = map(
            torch.zeros_like, (like.action, like.behavior_logits, like.behavior_value, like.core_state)
        )
        return Unrolls(inputs, ends, ends, action, logits, value, version, core_state)

    def discard(self) -> int:
        """Frees every finished unroll unread; how many those were."""
        with self._changed:
            count = len(self._ready)
            self._free.extend(self._ready)
            self._ready.clear()
        self.on_free()
        return count

    def gather(self, entry: Indices) -> Unrolls:
        """The unrolls of these entries [B], time-major."""
        row = entry * self._rows + self._time  # [T+1, B]
        t = np.broadcast_to(self._time, row.shape)
        record = Record(*(column[row] for column in self._host))
        place = self.place(np.broadcast_to(entry, row.shape).reshape(-1), t.reshape(-1), record.age.reshape(-1))

        def rows(column: Tensor) -> Tensor:
            return column.index_select(0, place.row).view(*row.shape, *column.shape[1:])

        def flag(bit: int) -> Tensor:
            return upload((record.flags & bit) != 0, self._device)

        return Unrolls(
            inputs=ModelInput(
                observation=tree_map(lambda stacks: stacks.view(*row.shape, *stacks.shape[1:]), self.stacks(place)),
                reward=upload(record.reward, self._device),
                last_action=upload(record.last_action, self._device),
                reset=flag(RESET),
            ),
            terminated=flag(TERMINATED),
            truncated=flag(TRUNCATED),
            action=upload(record.action, self._device),
            behavior_logits=rows(self._logits),
            behavior_value=rows(self._value),
            policy_version=record.policy_version,
            core_state=self._core_state.index_select(0, upload(entry, self._device)),
        )


class Frames:
    """The frames of one leaf of all observations, as rows of words on the device."""

    def __init__(self, spec: ArraySpec, count: int, frame_stack: int, device: torch.device) -> None:
        self._shape = spec.stacked(frame_stack).shape
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._word = _widest_word(spec.nbytes)
        self._device = device
        self.words = torch.empty(count, spec.nbytes // self._word.itemsize, dtype=self._word, device=device)
        self._bytes = self.words.view(torch.uint8).numpy() if device.type == "cpu" else None

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    def write(self, frame: Tensor, values: NDArray[Any]) -> None:
        values = np.ascontiguousarray(values).reshape(len(values), -1)
        if self._bytes is not None:  # by numpy, which moves whole rows, from any address
            self._bytes[frame.numpy()] = values.view(np.uint8)
        else:
            self.words.index_copy_(0, frame, upload(values, self._device).view(self._word))

    def stacks(self, stack: Tensor) -> Tensor:
        return self.words.index_select(0, stack).view(self._dtype).view(-1, *self._shape)


def _widest_word(nbytes: int) -> torch.dtype:
    """The widest integer that rows of this size consist of: torch moves those seven times as fast as single bytes."""
    for word in (torch.int64, torch.int32, torch.int16):
        if nbytes % word.itemsize == 0:
            return word
    return torch.uint8
