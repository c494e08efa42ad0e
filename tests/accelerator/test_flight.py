"""A batch between launch and finish, while the event loop reads streams and sessions may end."""

import asyncio

import numpy as np
import pytest
import torch

from seedrl.config import ModelConfig
from seedrl.serving.batch_loop import BatchLoop, Pauses
from seedrl.serving.batcher import Batcher
from seedrl.serving.sessions import Request
from seedrl.specs import ArraySpec, EnvSpec, discrete, leaves
from tests.accelerator.rig import LENGTH, Loop
from tests.accelerator.simulated import GPU
from tests.accelerator.streams import Event

VECTOR = EnvSpec(ArraySpec((3,), "float32"), discrete(3))


def loop(device: torch.device = GPU) -> Loop:
    is_simulated = device == GPU
    rig = Loop(VECTOR, ModelConfig(name="mlp", lstm=4), device, sizes=(8,) if is_simulated else (), graphs=is_simulated)
    rig.inference.warm_up(4)
    return rig


@pytest.mark.parametrize("device", [GPU, torch.device("cpu")], ids=str)
def test_session_that_ends_in_flight_is_not_answered_and_the_others_are_recorded(device: torch.device) -> None:
    rig = loop(device)
    staying, leaving = rig.join_all(requests=2)
    rig.answers.clear()
    rig.inference.launch(rig.requests([leaving, staying]))
    rig.inference.release(leaving)
    rig.inference.finish()
    assert [request.session for request, _ in rig.answers] == [staying]
    assert rig.metrics.rows == 2
    assert rig.metrics.rows_dropped == {"session_ended": 2, "partial_unroll": 0}
    assert rig.slots._next_row[:4].tolist() == [1, 1, 0, 0]


def test_answers_of_those_who_stay_are_their_own() -> None:
    with_others, alone = loop(), loop()
    answers = []
    for rig, has_left in ((with_others, True), (alone, False)):
        leaving, staying = rig.join_all(requests=2)
        rig.answers.clear()
        rig.inference.launch(rig.requests([leaving, staying]))
        if has_left:
            rig.inference.release(leaving)
        rig.inference.finish()
        answers += [action for request, action in rig.answers if request.session is staying]
    np.testing.assert_array_equal(*answers)


def test_batch_whose_sessions_have_all_ended_leaves_nothing_behind() -> None:
    rig = loop()
    (session,) = rig.join_all()
    rig.inference.launch(rig.requests([session]))
    rig.inference.release(session)
    rig.inference.finish()
    assert rig.metrics.rows == 0
    assert not rig.slots._next_row.any()
    assert rig.inference.finish_unrolls()


def test_slots_of_a_session_that_ended_in_flight_begin_again_with_the_next_one() -> None:
    rig = loop()
    first = rig.join([0, 1, 2, 3])
    for _ in range(LENGTH):
        rig.step([first])
    rig.inference.launch(rig.requests([first]))  # the last row of its unrolls
    rig.inference.release(first)
    rig.inference.finish()
    assert rig.selector.added == 0
    rig._row[:] = 0
    second = rig.join([0, 1, 2, 3])
    for _ in range(LENGTH + 1):
        rig.step([second])
    assert rig.selector.added == 4


def test_loop_turns_while_the_device_works_and_answers_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that come meanwhile are in the next batch, and everybody gets the actions of a run without a loop."""
    monkeypatch.setattr(Event, "unready", 5)
    rig, plain = loop(), loop()
    pauses = Pauses()
    batcher: Batcher[Request] = Batcher(8, 1, 0.001, on_submit=pauses.end)
    naps: list[float] = []
    batches = BatchLoop(batcher, rig.inference, rig.metrics, pauses, nap=naps.append)
    first, second = rig.join_all(requests=2)

    async def play() -> None:
        running = asyncio.create_task(batches.run())
        batcher.submit(*rig.requests([first]))
        while len(naps) < 3 and not running.done():
            await asyncio.sleep(0)
        batcher.submit(*rig.requests([second]))
        while len(rig.answers) < 2 and not running.done():
            await asyncio.sleep(0)
        batches.stop()
        await running

    asyncio.run(play())
    assert len(naps) >= 8
    one, other = plain.join_all(requests=2)
    expected = [leaf for session in (one, other) for leaf in plain.step([session])]
    got = [leaf for _, action in rig.answers for leaf in leaves(action)]
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
