"""Copies to and from the simulated accelerator through pinned memory: what arrives, and what may be relied on when."""

import numpy as np
import pytest
import torch

from seedrl.config import ModelConfig
from seedrl.device import Download, Staging
from seedrl.specs import ArraySpec, EnvSpec, discrete
from tests.accelerator.order import ORDER
from tests.accelerator.rig import LENGTH, Loop
from tests.accelerator.simulated import GPU, counted
from tests.accelerator.streams import Event

ARRAYS = (
    np.arange(5),
    np.array([[1.5, 2.5], [3.5, 4.5]], np.float32),
    np.array([True, False, True]),
    np.zeros(0, np.int64),
    np.array([7], np.uint8),
    np.array([[0.1], [0.2]]),
)


def test_staging_uploads_arrays_of_all_kinds_in_one_copy() -> None:
    staging, there = Staging(GPU), []
    counts = counted(lambda: there.extend(staging.upload(*ARRAYS)))
    assert counts["upload"] == 1
    for tensor, array in zip(there, ARRAYS, strict=True):
        assert tensor.device == GPU
        assert torch.equal(tensor.cpu(), torch.from_numpy(array))


def test_staging_joins_the_parts_of_each_column_wherever_they_are() -> None:
    parts = [np.arange(6, dtype=np.int16).reshape(3, 2)[:, ::-1], np.frombuffer(b"\1\0\2\0", np.int16).reshape(1, 2)]
    whole, other = Staging(GPU).upload_joined([parts, [np.ones(2, np.float32)]])
    assert whole.tolist() == [[1, 0], [3, 2], [5, 4], [1, 2]]
    assert other.tolist() == [1.0, 1.0]


def test_staging_grows_and_leaves_what_it_has_uploaded_alone() -> None:
    staging = Staging(GPU)
    (small,) = staging.upload(np.arange(3))
    (large,) = staging.upload(np.arange(1000))
    assert small.tolist() == [0, 1, 2]
    assert large.tolist() == list(range(1000))


def test_staging_waits_before_it_overwrites_what_is_being_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    with ORDER.watching() as races:
        staging = Staging(GPU)
        for _ in range(3):
            staging.upload(np.arange(3))
        assert not races
        monkeypatch.setattr(Event, "query", lambda event: True)  # without knowing it
        staging.upload(np.arange(3))
        assert list(races) == ["the host overwrites pinned memory that is read by copy_ on default"]


def test_download_is_there_only_after_waiting() -> None:
    download = Download(GPU)
    download.begin(torch.arange(3, device=GPU))
    assert download._copy.tolist() != [0, 1, 2]
    assert download.wait().tolist() == [0, 1, 2]


def test_download_is_ready_when_the_device_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "unready", 2)
    download = Download(GPU)
    download.begin(torch.arange(3, device=GPU))
    assert [download.is_ready() for _ in range(3)] == [False, False, True]
    assert download.wait().tolist() == [0, 1, 2]


def test_actions_that_are_not_waited_for_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = EnvSpec(ArraySpec((3,), "float32"), discrete(3))
    monkeypatch.setattr(Event, "synchronize", lambda event: None)
    actions = Loop(spec, ModelConfig(name="mlp"), GPU).play(LENGTH).actions
    assert not all(np.isin(each, (0, 1, 2)).all() for each in actions)
