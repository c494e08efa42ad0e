"""The learner-side row of every environment: where its unroll stands, its core_state, its running episode.

Knows nothing of sessions beyond their ids, nor of how actions are chosen.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from seedrl.actions import Actions
from seedrl.rows import LIFE, RESET, ends_game

Indices = NDArray[np.int64]

NOBODY = 0  # no session has this id


class WritePosition(NamedTuple):
    """The places where the next rows of some slots are recorded."""

    entry: Indices  # [N]  of the store
    t: Indices  # [N]  row of the unroll
    age: Indices  # [N]  rows since the episode began, at most frame_stack - 1


class FinishedEpisodes(NamedTuple):
    slots: Indices
    returns: NDArray[np.float64]
    lengths: Indices

    def where(self, is_wanted: NDArray[np.bool_]) -> "FinishedEpisodes":
        """Return some of them."""
        return FinishedEpisodes(self.slots[is_wanted], self.returns[is_wanted], self.lengths[is_wanted])


class Slots:
    """Owned by the server thread. Bookkeeping is numpy on the host; core_state is on the device.

    The last slot is spare: no session has it, and rows that only pad a batch are its own.
    """

    def __init__(self, count: int, actions: Actions, frame_stack: int, core_size: int, device: torch.device) -> None:
        self.spare = count
        count += 1
        self.entry = np.arange(count)  # the store's entry each slot is writing
        self._next_row = np.zeros(count, np.int64)
        self._age = np.zeros(count, np.int64)
        self._max_age = frame_stack - 1
        self._last_action = np.zeros((count, *actions.shape), actions.dtype)
        self._core_state = torch.zeros(count, core_size, device=device)
        self._session = np.zeros(count, np.int64)
        self._episode_return = np.zeros(count, np.float64)
        self._episode_length = np.zeros(count, np.int64)

    def claim(self, slots: Indices, session_id: int) -> tuple[Indices, Indices]:
        """Give slots to a session, or to NOBODY.

        Returns those that were another session's, and how many rows of an unfinished unroll each of them loses.
        """
        taken: Indices = slots[self._session[slots] != session_id]
        lost: Indices = self._next_row[taken]
        self._next_row[taken] = 0
        self._session[taken] = session_id
        return taken, lost

    def locate(self, slots: Indices, resets: Indices) -> WritePosition:
        """Return where the next rows go; `resets` are those slots whose episode begins."""
        if self._max_age:
            self._age[slots] = np.minimum(self._age[slots] + 1, self._max_age)
            self._age[resets] = 0
        self._last_action[resets] = 0
        return WritePosition(self.entry[slots], self._next_row[slots], self._age[slots])

    def last_action(self, slots: Indices) -> NDArray[Any]:
        """Return the action taken before, which is 0 where an episode begins."""
        return self._last_action[slots]

    def core_state(self, slots: Tensor) -> Tensor:
        """Return the core_state [N, S] of slots that are given on the device."""
        if not self._core_state.shape[1]:
            return self._core_state[: len(slots)]
        return self._core_state.index_select(0, slots)

    def keep_core_state(self, slots: Tensor, core_state: Tensor) -> None:
        """Keep the core_state [N, S] after the newest rows of slots that are given on the device."""
        if core_state.shape[1]:
            self._core_state.index_copy_(0, slots, core_state)

    def advance(self, slots: Indices, action: NDArray[Any]) -> None:
        """Note that one more row of each is recorded, with this action."""
        self._next_row[slots] += 1
        self._last_action[slots] = action

    def start_unroll(self, slots: Indices, entries: Indices, overlap: int) -> None:
        """Continue in fresh entries whose first `overlap` rows are there: the last ones of the unroll before."""
        self.entry[slots] = entries
        self._next_row[slots] = overlap

    def count_episodes(self, slots: Indices, reward: NDArray[np.float32], flags: NDArray[np.uint8]) -> FinishedEpisodes:
        """Add the rewards to the running episodes; return those that end here. A game ends with its last life."""
        if flags.any():
            new = slots[(flags & (RESET | LIFE)) == RESET]
            self._episode_return[new] = 0.0
            self._episode_length[new] = 0
            self._episode_length[slots[(flags & RESET) != 0]] -= 1  # the reset row itself is no step
        self._episode_return[slots] += reward
        self._episode_length[slots] += 1
        ended = slots[ends_game(flags)]
        return FinishedEpisodes(ended, self._episode_return[ended], self._episode_length[ended])
