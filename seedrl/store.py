"""The unrolls on the device: the hand-off from serving to learning. Knows nothing of streams, models or losses.

One preallocated ring. An *entry* is room for one unroll: T+1 rows, the core_state before row 0, and the frames of those
rows preceded by the frame_stack-1 frames that the stack of row 0 reaches back to. Each slot always owns one entry,
which inference writes row by row; `capacity` further entries are free or hold finished unrolls.

    free ──roll──→ written by its slot ──commit──→ ready ──take──→ free

Consecutive unrolls of a slot share one row: row T of one is row 0 of the next. Frames are stored once; `stacks`
rebuilds what the policy saw, by index, for inference and training alike.
"""

import threading
from collections import deque

import numpy as np
import torch
from torch import Tensor

from seedrl.specs import EnvSpec
from seedrl.types import ModelInput, ModelOutput, Unrolls


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
        self.completed = 0  # unrolls committed so far; written by the inference thread
        self._rows = unroll_length + 1
        self._frame_rows = frame_stack - 1 + self._rows
        self._observation_shape = spec.observation.stacked(frame_stack).shape
        self._device = device
        entries = slots + capacity

        def column(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(entries * self._rows, *shape, dtype=dtype, device=device)

        self._frame_dtype: torch.dtype = getattr(torch, spec.observation.dtype)
        self._word = _widest_word(spec.observation.nbytes)
        words = spec.observation.nbytes // self._word.itemsize
        self._frames = torch.empty(entries * self._frame_rows, words, dtype=self._word, device=device)
        self._reward = column(torch.float32)
        self._reset = column(torch.bool)
        self._terminated = column(torch.bool)
        self._truncated = column(torch.bool)
        self._age = column(torch.int64)
        self._last_action = column(torch.int64)
        self._action = column(torch.int64)
        self._logits = column(torch.float32, spec.num_actions)
        self._value = column(torch.float32)
        self._policy_version = column(torch.int64)
        self._core_state = torch.zeros(entries, core_size, device=device)
        self.slot = np.zeros(entries, np.int64)  # whose unroll an entry holds

        self._columns = [
            self._reward,
            self._reset,
            self._terminated,
            self._truncated,
            self._age,
            self._last_action,
            self._action,
            self._logits,
            self._value,
            self._policy_version,
        ]
        self._time = torch.arange(self._rows, device=device)
        self._back = torch.arange(frame_stack - 1, -1, -1, device=device)  # oldest frame first
        self._free = list(range(slots, entries))
        self._ready: deque[int] = deque()
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        tensors = [self._frames, self._core_state, *self._columns]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @classmethod
    def bytes_needed(cls, spec: EnvSpec, **sizes: int) -> int:
        """`nbytes` of a store of these sizes, without making one."""
        return cls(spec, **sizes, device=torch.device("meta")).nbytes

    @property
    def ready(self) -> int:
        """Finished unrolls waiting to be trained on."""
        return len(self._ready)

    # Written by inference, one row of each of N entries at a time.

    def write_frames(self, entry: Tensor, t: Tensor, observation: Tensor) -> None:
        frames = observation.contiguous().view(len(observation), -1).view(self._word)
        self._frames.index_copy_(0, self._frame_index(entry, t), frames)

    def stacks(self, entry: Tensor, t: Tensor, age: Tensor) -> Tensor:
        """The stacked observations [..., frame_stack * C, ...] of rows t of entries, indices of any shape.

        `age` counts rows since the episode began, at most frame_stack-1: an older frame than the first of the
        episode is the first of the episode, as envpool's own stack_num has it.
        """
        newest = self._frame_index(entry, t)
        if self.frame_stack == 1:
            frames = self._frames.index_select(0, newest.flatten())
        else:
            index = newest.unsqueeze(-1) - torch.minimum(self._back, age.unsqueeze(-1))
            frames = self._frames.index_select(0, index.flatten())
        return frames.view(self._frame_dtype).view(*newest.shape, *self._observation_shape)

    def write_rows(
        self,
        entry: Tensor,
        t: Tensor,
        inputs: ModelInput,
        output: ModelOutput,
        *,
        terminated: Tensor,
        truncated: Tensor,
        age: Tensor,
        action: Tensor,
        policy_version: int,
    ) -> None:
        """Everything but the frames; all arguments [N, ...]."""
        row = entry * self._rows + t
        self._reward.index_copy_(0, row, inputs.reward)
        self._reset.index_copy_(0, row, inputs.reset)
        self._terminated.index_copy_(0, row, terminated)
        self._truncated.index_copy_(0, row, truncated)
        self._age.index_copy_(0, row, age)
        self._last_action.index_copy_(0, row, inputs.last_action)
        self._action.index_copy_(0, row, action)
        self._logits.index_copy_(0, row, output.logits)
        self._value.index_copy_(0, row, output.value)
        self._policy_version.index_fill_(0, row, policy_version)

    def begin(self, entry: Tensor, core_state: Tensor) -> None:
        """The core_state [N, S] before row 0 of these entries."""
        self._core_state.index_copy_(0, entry, core_state)

    def reserve(self, count: int, timeout: float) -> list[int]:
        """Up to `count` free entries, at least one, waiting for the learner if there is none; empty at the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._free, timeout)
            # The newest first: what was read last is still in the caches.
            return [self._free.pop() for _ in range(min(count, len(self._free)))]

    def roll(self, finished: Tensor, fresh: Tensor) -> None:
        """Makes row T of finished entries row 0 of fresh ones, with the frames its stack reaches back to."""
        source, target = finished * self._rows + self.unroll_length, fresh * self._rows
        for column in self._columns:
            column.index_copy_(0, target, column.index_select(0, source))
        stack = torch.arange(self.frame_stack, device=self._device)
        source = (finished * self._frame_rows + self.unroll_length).unsqueeze(-1) + stack
        target = (fresh * self._frame_rows).unsqueeze(-1) + stack
        self._frames.index_copy_(0, target.flatten(), self._frames.index_select(0, source.flatten()))

    def commit(self, entries: list[int]) -> None:
        """These unrolls are finished: the learner may train on them."""
        with self._changed:
            self._ready.extend(entries)
            self.completed += len(entries)
            self._changed.notify_all()

    # Read by the learner.

    def take(self, count: int, timeout: float) -> Unrolls | None:
        """The `count` oldest finished unrolls, copied out so that their entries are free again; None at the timeout."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._ready) >= count, timeout):
                return None
            entries = [self._ready.popleft() for _ in range(count)]
        unrolls = self.gather(torch.tensor(entries, device=self._device))
        with self._changed:
            self._free.extend(entries)
            self._changed.notify_all()
        return unrolls

    def discard(self) -> int:
        """Frees every finished unroll unread; how many those were."""
        with self._changed:
            count = len(self._ready)
            self._free.extend(self._ready)
            self._ready.clear()
            self._changed.notify_all()
        return count

    def gather(self, entry: Tensor) -> Unrolls:
        """The unrolls of these entries [B], time-major."""
        entry_tb = entry.expand(self._rows, -1)
        t_tb = self._time.unsqueeze(-1).expand(-1, len(entry))
        row = (entry_tb * self._rows + t_tb).flatten()

        def rows(column: Tensor) -> Tensor:
            return column.index_select(0, row).view(self._rows, len(entry), *column.shape[1:])

        return Unrolls(
            inputs=ModelInput(
                observation=self.stacks(entry_tb, t_tb, rows(self._age)),
                reward=rows(self._reward),
                last_action=rows(self._last_action),
                reset=rows(self._reset),
            ),
            terminated=rows(self._terminated),
            truncated=rows(self._truncated),
            action=rows(self._action),
            behavior_logits=rows(self._logits),
            behavior_value=rows(self._value),
            policy_version=rows(self._policy_version),
            core_state=self._core_state.index_select(0, entry),
        )

    def _frame_index(self, entry: Tensor, t: Tensor) -> Tensor:
        return entry * self._frame_rows + (self.frame_stack - 1) + t


def _widest_word(nbytes: int) -> torch.dtype:
    """The widest integer that rows of this size consist of: torch moves words seven times as fast as single bytes."""
    for word in (torch.int64, torch.int32, torch.int16):
        if nbytes % word.itemsize == 0:
            return word
    return torch.uint8
