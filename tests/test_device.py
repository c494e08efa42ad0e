"""Tests of the choice of a device, and of how arrays get there. None of them needs a GPU."""

import warnings

import numpy as np
import pytest
import torch

from seedrl.config import Device
from seedrl.device import after_serving, choose_device, finish, own_stream, upload
from seedrl.errors import ConfigError

CPU = torch.device("cpu")


def test_upload_to_the_cpu_is_the_same_memory() -> None:
    array = np.zeros(3, np.float32)
    tensor = upload(array, CPU)
    array[1] = 7
    assert tensor.tolist() == [0, 7, 0]


def test_upload_of_a_message_warns_nobody() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert upload(np.frombuffer(b"\1\2", np.uint8), CPU).tolist() == [1, 2]


def test_choose_device_cuda_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(Device.auto) == choose_device(Device.cpu) == CPU
    with pytest.raises(ConfigError, match="device=cuda, but torch sees no CUDA device here"):
        choose_device(Device.cuda)


def test_choose_device_auto_takes_cuda_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(Device.auto) == choose_device(Device.cuda) == torch.device("cuda")
    assert choose_device(Device.cpu) == CPU


def test_streams_cost_nothing_on_the_cpu() -> None:
    with own_stream(CPU):
        after_serving(CPU)
        finish(CPU)
