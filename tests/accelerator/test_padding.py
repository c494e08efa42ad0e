"""Batches that are padded to a few sizes: nobody notices the rows of padding."""

import numpy as np
import pytest
import torch

from seedrl.config import ModelConfig
from seedrl.serving.seats import EVALUATION, Exploration, Seat
from seedrl.specs import ArraySpec, EnvSpec, discrete
from tests.accelerator.rig import LENGTH, Loop, Played
from tests.accelerator.simulated import GPU

VECTOR = EnvSpec(ArraySpec((3,), "float32"), discrete(3))
IMAGE = EnvSpec(ArraySpec((1, 36, 36), "uint8"), discrete(3))
KINDS: dict[str, tuple[ModelConfig, EnvSpec, int]] = {
    "memory": (ModelConfig(name="mlp", lstm=4), VECTOR, 1),
    "images": (ModelConfig(name="nature"), IMAGE, 2),
}


def play(kind: str, sizes: tuple[int, ...]) -> Played:
    config, spec, frame_stack = KINDS[kind]
    seats = [Seat(), Seat(exploration=Exploration(2.0, 0.1)), EVALUATION, Seat()]
    return Loop(spec, config, GPU, frame_stack=frame_stack, sizes=sizes).play(4 * LENGTH, seats=seats)


@pytest.mark.parametrize("kind", KINDS)
def test_padded_batches_act_and_learn_as_those_that_are_not(kind: str) -> None:
    padded, plain = play(kind, (1, 7)), play(kind, ())
    for mine, other in zip(padded.actions, plain.actions, strict=True):
        np.testing.assert_array_equal(mine, other)
    for name, weights in padded.weights.items():
        torch.testing.assert_close(weights, plain.weights[name], rtol=1e-4, atol=1e-5, msg=name)


def test_padding_is_neither_answered_nor_counted_nor_trained_on() -> None:
    rig = Loop(VECTOR, ModelConfig(name="mlp"), GPU, sizes=(16,))
    rig.inference.warm_up(4)
    sessions = rig.join_all()
    answers = [len(rig.step(sessions)[0]) for _ in range(2 * LENGTH + 1)]
    assert answers == [4] * len(answers)
    assert rig.metrics.rows == 4 * len(answers)
    assert rig.selector.added == 8
    spare = rig.store.columns.spare
    taken = rig.store.take(4, timeout=0)
    assert taken is not None
    assert spare not in taken.ticket.entry
    assert rig.slots.entry[rig.slots.spare] == spare


def test_padding_repeats_an_observation_that_is_valid() -> None:
    """Numbers that no environment sends, such as an index that is too large, would stop a real device."""
    rig = Loop(VECTOR, ModelConfig(name="mlp"), GPU, sizes=(9,))
    rig.step(rig.join_all())
    frames = rig.store.columns.read(np.array([0, 1, 2, 3, rig.store.columns.spare]))["observation"][:, 0]
    assert torch.equal(frames[4], frames[3])
