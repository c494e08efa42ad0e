"""Ranks compare their devices before they choose a back end, and tell faults of their own from a rank that is gone."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import distributed

from seedrl.errors import ConfigError, RankLost
from seedrl.ranks.devices import RankDevice, agree_on_backend, device_of
from seedrl.ranks.group import Ranks
from seedrl.run.identity import Identity


def agreed(devices: Sequence[RankDevice]) -> list[str]:
    """Return what each of several ranks, which are threads, makes of their devices: a back end, or a refusal."""
    store, world = distributed.HashStore(), len(devices)
    store.set_timeout(timedelta(seconds=30))

    def rank_of(rank: int) -> str:
        try:
            return agree_on_backend(store, Identity("learner", rank, world), devices[rank])
        except ConfigError as error:
            return f"refused: {error}"

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank_of, range(world)))


def test_ranks_that_all_have_cpus_use_gloo() -> None:
    assert agreed([RankDevice("cpu", "a"), RankDevice("cpu", "a"), RankDevice("cpu", "b")]) == ["gloo"] * 3


def test_ranks_that_all_have_cuda_use_nccl_for_it() -> None:
    assert agreed([RankDevice("cuda", "a", "GPU-1"), RankDevice("cuda", "a", "GPU-2")]) == ["cpu:gloo,cuda:nccl"] * 2


def test_ranks_with_devices_of_different_kinds_all_refuse_and_say_who_has_what() -> None:
    words = agreed([RankDevice("cuda", "a", "GPU-1"), RankDevice("cpu", "b"), RankDevice("cuda", "c", "GPU-2")])
    assert len(set(words)) == 1
    assert words[0].startswith(
        "refused: ranks need devices of one kind: rank 0 on a has cuda, rank 1 on b has cpu, rank 2 on c has cuda; set"
    )


def test_ranks_that_share_a_device_all_refuse_even_if_each_sees_only_one() -> None:
    """CUDA_VISIBLE_DEVICES may give all ranks the same one, which has number 0 in each of them."""
    words = agreed([RankDevice("cuda", "a", unit) for unit in ("GPU-1", "GPU-2", "GPU-1")])
    assert len(set(words)) == 1
    assert words[0].startswith("refused: rank 0 and rank 2 share one device of a (GPU-1), and NCCL refuses that; let")


def test_devices_that_cannot_be_told_apart_are_left_to_nccl() -> None:
    """Older versions of torch do not say which one a device is."""
    assert agreed([RankDevice("cuda", "a"), RankDevice("cuda", "a")]) == ["cpu:gloo,cuda:nccl"] * 2


def test_device_of_a_rank_is_known_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-7"))
    own = Identity("learner", 1, 2, node="host")
    assert device_of(own, torch.device("cuda", 0)) == RankDevice("cuda", "host", "GPU-7")
    assert device_of(own, torch.device("cpu")) == RankDevice("cpu", "host")


PLACE = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537]"
LOST = [
    RuntimeError(f"{PLACE} Read error [127.0.0.1]:52968: Connection reset by peer. This is typically caused by …"),
    RuntimeError(f"{PLACE} Connection closed by peer [10.0.0.2]:4711"),
    RuntimeError(f"{PLACE} Timed out waiting 4000ms for recv operation to complete"),
    RuntimeError("Application timeout caused pair closure"),
    distributed.DistStoreError("Timed out after 5 seconds waiting for clients. 1/2 clients joined."),
    distributed.DistNetworkError("Failed to recv, got 0 bytes."),
    distributed.DistBackendError("NCCL error in: NCCLUtils.hpp, remote process exited\nncclRemoteError: A call failed"),
    distributed.DistBackendError("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)"),
]
OWN = [
    RuntimeError("Invalid scalar type"),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError(f"[enforce fail at {PLACE}] op.preamble.length <= op.nbytes. 8 vs 4."),
    RuntimeError("ProcessGroupGloo::allreduce: unsupported layout"),
    distributed.DistBackendError("NCCL error in: NCCLUtils.hpp, invalid usage\nDuplicate GPU detected"),
]


def collective_that_fails(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(distributed, "all_reduce", fail)
    Ranks(Identity("learner", 0, 2)).all_reduce_mean([torch.zeros(1)])


@pytest.mark.parametrize("error", LOST, ids=lambda error: str(error)[-20:])
def test_error_of_a_connection_is_a_lost_rank(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankLost, match=r"another rank is gone or has not answered for ranks.timeout seconds \("):
        collective_that_fails(error, monkeypatch)
    with pytest.raises(RankLost), Ranks(Identity("learner", 0, 2)).backward():
        raise error


@pytest.mark.parametrize("error", OWN, ids=lambda error: str(error)[-20:])
def test_error_of_this_rank_stays_what_it_is(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError) as caught:
        collective_that_fails(error, monkeypatch)
    assert caught.value is error
    with pytest.raises(RuntimeError) as caught, Ranks(Identity("learner", 0, 2)).backward():
        raise error
    assert caught.value is error
