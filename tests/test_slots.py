"""Tests of where each environment's next row goes, and of the return of its episode."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seedrl.actions import Actions
from seedrl.rows import LIFE, RESET, TERMINATED, TRUNCATED
from seedrl.serving.slots import Slots, WritePosition
from tests.fakes import make_spec


def make_slots(count: int = 4, frame_stack: int = 1) -> Slots:
    return Slots(count, Actions(make_spec()), frame_stack, core_size=0, device=torch.device("cpu"))


def indices(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def flags(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def rewards(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def locate(slots: Slots, which: np.ndarray, row_flags: np.ndarray) -> WritePosition:
    return slots.locate(which, which[(row_flags & RESET) != 0])


def advance(slots: Slots, which: np.ndarray, action: int = 0) -> None:
    slots.advance(which, np.full(len(which), action))


def test_last_action_is_the_one_before_and_zero_where_an_episode_begins() -> None:
    slots = make_slots()
    advance(slots, indices(0, 1, 2), action=5)
    locate(slots, indices(0, 1), flags(RESET, 0))
    assert slots.last_action(indices(0, 1, 2, 3)).tolist() == [0, 5, 5, 0]


def test_core_state_is_what_each_slot_remembered_last() -> None:
    slots = Slots(3, Actions(make_spec()), frame_stack=1, core_size=2, device=torch.device("cpu"))
    slots.keep_core_state(torch.tensor([2, 0]), torch.tensor([[2.0, 2.5], [0.0, 0.5]]))
    assert slots.core_state(torch.tensor([0, 1, 2])).tolist() == [[0.0, 0.5], [0.0, 0.0], [2.0, 2.5]]


def test_locate_fresh_slots_start_at_row_zero_of_their_own_entry() -> None:
    position = locate(make_slots(), indices(2, 0), flags(RESET, RESET))
    assert position.entry.tolist() == [2, 0]
    assert position.t.tolist() == [0, 0]
    assert position.age.tolist() == [0, 0]


def test_advance_moves_only_the_slots_given() -> None:
    slots = make_slots()
    advance(slots, indices(1, 3))
    advance(slots, indices(3))
    assert locate(slots, indices(0, 1, 2, 3), flags(0, 0, 0, 0)).t.tolist() == [0, 1, 0, 2]


def test_start_unroll_continues_at_row_one_of_the_fresh_entry() -> None:
    slots = make_slots()
    advance(slots, indices(0, 1))
    slots.start_unroll(indices(1), indices(9), overlap=1)
    position = locate(slots, indices(0, 1), flags(0, 0))
    assert position.entry.tolist() == [0, 9]
    assert position.t.tolist() == [1, 1]


def test_locate_age_counts_to_frame_stack_and_restarts_at_reset() -> None:
    slots = make_slots(frame_stack=4)
    ages = [int(locate(slots, indices(1), flags(flag)).age[0]) for flag in (RESET, 0, 0, 0, 0, TERMINATED, RESET, 0)]
    assert ages == [0, 1, 2, 3, 3, 3, 0, 1]


def test_locate_one_frame_has_age_zero_always() -> None:
    slots = make_slots(frame_stack=1)
    assert [int(locate(slots, indices(1), flags(flag)).age[0]) for flag in (RESET, 0, 0)] == [0, 0, 0]


def test_claim_by_new_session_discards_partial_unrolls() -> None:
    slots = make_slots()
    taken, lost = slots.claim(indices(0, 1, 2, 3), session_id=1)
    assert (taken.tolist(), lost.tolist()) == ([0, 1, 2, 3], [0, 0, 0, 0])
    advance(slots, indices(0, 1, 2))
    advance(slots, indices(0))
    taken, lost = slots.claim(indices(0, 1), session_id=2)
    assert (taken.tolist(), lost.tolist()) == ([0, 1], [2, 1])
    assert locate(slots, indices(0, 1, 2), flags(RESET, RESET, 0)).t.tolist() == [0, 0, 1]


def test_claim_by_same_session_discards_nothing() -> None:
    slots = make_slots()
    slots.claim(indices(0, 1), session_id=1)
    advance(slots, indices(0, 1))
    assert slots.claim(indices(0, 1), session_id=1)[0].size == 0
    assert locate(slots, indices(0, 1), flags(0, 0)).t.tolist() == [1, 1]


def test_claim_keeps_the_entry_it_writes() -> None:
    slots = make_slots()
    slots.claim(indices(0), session_id=1)
    slots.start_unroll(indices(0), indices(7), overlap=1)
    slots.claim(indices(0), session_id=2)
    position = locate(slots, indices(0), flags(RESET))
    assert (position.entry.tolist(), position.t.tolist()) == ([7], [0])


@pytest.mark.parametrize("ending", [TERMINATED, TRUNCATED])
def test_count_episodes_reset_row_is_no_step(ending: int) -> None:
    slots = make_slots()
    for flag in (RESET, 0, 0):
        finished = slots.count_episodes(indices(1), rewards(0.5 * (flag == 0)), flags(flag))
        assert len(finished.returns) == 0
    finished = slots.count_episodes(indices(1), rewards(-3), flags(ending))
    assert finished.returns.tolist() == [-2.0]
    assert finished.lengths.tolist() == [3]


def test_count_episodes_reset_forgets_what_was_left_unfinished() -> None:
    slots = make_slots()
    slots.count_episodes(indices(1), rewards(100), flags(0))
    slots.count_episodes(indices(1), rewards(0), flags(RESET))
    finished = slots.count_episodes(indices(1), rewards(1), flags(TERMINATED))
    assert (finished.returns.tolist(), finished.lengths.tolist()) == ([1.0], [1])


def test_count_episodes_game_of_several_lives_is_one_episode() -> None:
    slots = make_slots()
    ends = [RESET, 0, TERMINATED | LIFE, RESET | LIFE, 0, TERMINATED | LIFE, RESET | LIFE, TERMINATED]
    for flag in ends[:-1]:
        finished = slots.count_episodes(indices(1), rewards(flag & RESET == 0), flags(flag))
        assert len(finished.returns) == 0
    finished = slots.count_episodes(indices(1), rewards(1), flags(ends[-1]))
    assert (finished.returns.tolist(), finished.lengths.tolist()) == ([5.0], [5])


@settings(deadline=None)
@given(episodes=st.lists(st.lists(st.integers(-1000, 1000).map(float), min_size=1, max_size=6), min_size=1, max_size=6))
def test_count_episodes_any_lengths_sum_raw_rewards(episodes: list[list[float]]) -> None:
    """Each episode is played in slot 2, while slot 0 is always in the middle of one."""
    slots = make_slots()
    slots.count_episodes(indices(0), rewards(0), flags(RESET))
    seen = []
    for episode in episodes:
        slots.count_episodes(indices(0, 2), rewards(1, 0), flags(0, RESET))
        for step, reward in enumerate(episode, start=1):
            flag = TERMINATED if step == len(episode) else 0
            finished = slots.count_episodes(indices(2, 0), rewards(reward, 1), flags(flag, 0))
            seen += list(zip(finished.returns.tolist(), finished.lengths.tolist(), strict=True))
    assert seen == [(sum(episode), len(episode)) for episode in episodes]
