"""Tests of the choice of a device, and of how arrays get there. None of them needs a GPU."""

import warnings

import numpy as np
import pytest
import torch

from seedrl.device import (
    Download,
    Staging,
    after_serving,
    choose_device,
    finish,
    learning_stream,
    serving_stream,
    upload,
)
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


def fake_cuda(monkeypatch: pytest.MonkeyPatch, count: int) -> list[torch.device]:
    """Let torch see this many devices; return the list that those that were made current are appended to."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    return current


def test_choose_device_cuda_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, 0)
    assert choose_device("auto") == choose_device("cpu") == CPU
    with pytest.raises(ConfigError, match="device=cuda, but torch sees no CUDA device here"):
        choose_device("cuda")


def test_choose_device_auto_takes_cuda_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    current = fake_cuda(monkeypatch, 2)
    first = torch.device("cuda", 0)
    assert choose_device("auto") == choose_device("cuda") == first
    assert choose_device("cpu") == CPU
    assert current == [first, first]


def test_choose_device_without_a_number_follows_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    current = fake_cuda(monkeypatch, 2)
    assert [choose_device("auto", local_rank).index for local_rank in range(2)] == [0, 1]
    assert choose_device("cuda:1", local_rank=0) == torch.device("cuda", 1) == current[-1]


def test_choose_device_of_more_ranks_than_devices_is_refused_unless_each_sees_only_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_cuda(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"rank 2 of this machine would share .* only 2 of them"):
        choose_device("auto", local_rank=2)
    fake_cuda(monkeypatch, 1)
    assert choose_device("auto", local_rank=2).index == 0


@pytest.mark.parametrize("wanted", ["gpu", "cuda:", "cuda:one", "cpu:0", "auto:1", "", "CUDA"])
def test_choose_device_that_is_none_is_refused_by_name(wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"device='{wanted}' is none of auto, cpu, cuda, cuda:NUMBER"):
        choose_device(wanted)


def test_choose_device_beyond_the_last_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda(monkeypatch, 2)
    with pytest.raises(ConfigError, match="device=cuda:2, but torch sees only 2 of them here, from cuda:0"):
        choose_device("cuda:2")


def test_streams_cost_nothing_on_the_cpu() -> None:
    with learning_stream(CPU), serving_stream(CPU):
        after_serving(CPU)
        finish(CPU)


def test_staging_on_the_cpu_copies_only_to_join() -> None:
    first, second = np.zeros(2, np.float32), np.ones(1, np.float32)
    staging = Staging(CPU)
    (shared,) = staging.upload(first)
    whole, alone = staging.upload_joined([[first, second], [second]])
    first[1] = second[0] = 7
    assert shared.tolist() == [0, 7]
    assert whole.tolist() == [0, 0, 1]
    assert alone.tolist() == [7]


def test_download_from_the_cpu_is_the_same_memory() -> None:
    download, tensor = Download(CPU), torch.zeros(2)
    download.begin(tensor)
    tensor[1] = 7
    assert download.wait().tolist() == [0, 7]
