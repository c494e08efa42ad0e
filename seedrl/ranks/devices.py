"""The devices of all ranks, which they compare before a back end is chosen: gloo for CPUs, NCCL as well for CUDA.

With different back ends ranks would wait for each other for ever, and NCCL refuses two ranks on one device in words
that do not help. Knows nothing of collective operations: ranks read each other's notes in the store where they meet.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.distributed_c10d import Store

from seedrl.errors import require
from seedrl.run.identity import Identity

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


class RankDevice(NamedTuple):
    """The device of one rank."""

    kind: str  # cpu or cuda
    node: str
    unit: str = ""  # the same only if the device is, whatever number it has in a process; empty if that is not known


def device_of(identity: Identity, device: torch.device) -> RankDevice:
    """Return what the other ranks have to know of this rank's device."""
    unit = getattr(torch.cuda.get_device_properties(device), "uuid", "") if device.type == "cuda" else ""
    return RankDevice(device.type, identity.node, str(unit))


def agree_on_backend(store: Store, identity: Identity, own: RankDevice) -> str:
    """Return the back end for the devices of all ranks. If they do not fit, all ranks raise the same ConfigError."""
    store.set(f"device of {identity.rank}", json.dumps(own))
    devices = [RankDevice(*json.loads(store.get(f"device of {rank}"))) for rank in range(identity.world_size)]
    store.set(f"{identity.rank} has read", "")
    if identity.is_first:  # which the store may end with
        store.wait([f"{rank} has read" for rank in range(identity.world_size)])
    check_devices(devices)
    return BACKENDS[own.kind]


def check_devices(devices: Sequence[RankDevice]) -> None:
    """Raise ConfigError unless all ranks have devices of one kind, and each accelerator is that of one rank."""
    known = [f"rank {rank} on {device.node} has {device.kind}" for rank, device in enumerate(devices)]
    require(
        len({device.kind for device in devices}) == 1,
        f"ranks need devices of one kind: {', '.join(known)}; set device=cpu, or device=cuda, with which a rank that "
        "sees no such device says so",
    )
    sharing = defaultdict(list)
    for rank, device in enumerate(devices):
        if device.unit:
            sharing[device].append(f"rank {rank}")
    for device, ranks in sharing.items():
        require(
            len(ranks) == 1,
            f"{' and '.join(ranks)} share one device of {device.node} ({device.unit}), and NCCL refuses that; let each "
            "rank see one of its own (CUDA_VISIBLE_DEVICES), start fewer ranks, or set device=cpu",
        )
