"""The collective operations of the learner processes, *ranks*, that train one model together.

They are those of torch.distributed, by gloo for the host and NCCL for CUDA, and have its names; torchrun starts the
ranks. Knows nothing of what is sent or trained. Nothing is pickled: objects travel as JSON.

Every operation is called by *all* ranks, in the same order, by one thread at a time. If another rank is gone, or does
not call it for `ranks.timeout` seconds, it raises RankLost. Whatever else fails is a fault of this rank, and its error
stays what it is.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from seedrl.errors import RankLost
from seedrl.ranks.devices import agree_on_backend, device_of
from seedrl.run.identity import Identity

Json = TypeVar("Json")
Layout = tuple[str, list[int]]  # type and shape of a tensor

# The words of gloo and NCCL for a connection that has ended or was silent for too long; few have a type of their own.
LOST = re.compile(
    r"connection (closed|reset|refused|was)|closed the connection|socket (unexpectedly )?closed|(read|write) error|"
    r"broken pipe|unreachable|pair (closure|is not connected)|time(d )?out|ncclRemoteError|communicator was aborted",
    re.IGNORECASE,
)


class Ranks:
    """The group of ranks. Owned by the main thread, and by the learner thread while that runs."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity

    @classmethod
    def join(cls, identity: Identity, device: torch.device, timeout: float) -> "Ranks":
        """Wait for the other ranks. The environment variables that torchrun sets contain the address to meet at.

        Raises ConfigError on all ranks if their devices do not fit together.
        """
        patience, own = timedelta(seconds=timeout), device_of(identity, device)
        with _lost_if_it_fails():
            store, _, _ = next(rendezvous("env://", identity.rank, identity.world_size, timeout=patience))
            store.set_timeout(patience)
            backend = agree_on_backend(PrefixStore("devices", store), identity, own)
            distributed.init_process_group(
                backend,
                store=PrefixStore("ranks", store),
                rank=identity.rank,
                world_size=identity.world_size,
                timeout=patience,
                device_id=device if device.type == "cuda" else None,
            )
        return cls(identity)

    def leave(self) -> None:
        if distributed.is_initialized():
            distributed.destroy_process_group()

    # Objects and numbers, through the host.

    def broadcast_object(self, value: Json, source: int = 0) -> Json:
        """Return the value that rank `source` has; the values of the other ranks are ignored."""
        is_source = self.identity.rank == source
        encoded = _encoded(value) if is_source else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(encoded)])
        self.broadcast([size], source)
        encoded = encoded if is_source else torch.empty(int(size), dtype=torch.uint8)
        self.broadcast([encoded], source)
        return value if is_source else _decoded(encoded)

    def all_gather_object(self, value: Json) -> list[Json]:
        """Return the values of all ranks, by rank."""
        encoded = _encoded(value)
        sizes = [int(size) for (size,) in self.all_gather_numbers([len(encoded)])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(encoded)] = encoded
        return [_decoded(each[:size]) for each, size in zip(self._all_gather(padded), sizes, strict=True)]

    def all_gather_numbers(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows of all ranks, which have the same length. Integers are exact up to 2**53."""
        return [each.tolist() for each in self._all_gather(torch.tensor(row, dtype=torch.float64))]

    def broadcast_tensors(self, tensors: Mapping[str, Tensor], source: int = 0) -> dict[str, Tensor]:
        """Return the tensors of rank `source`, on the host; the other ranks need not know what there is."""
        host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        layouts = self.broadcast_object({name: _layout(tensor) for name, tensor in host.items()}, source)
        if self.identity.rank != source:
            host = {name: _empty(layout) for name, layout in layouts.items()}
        self.broadcast((host[name] for name in layouts), source)
        return host

    def _all_gather(self, own: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(own) for _ in range(self.identity.world_size)]
        with _lost_if_it_fails():
            distributed.all_gather(gathered, own)
        return gathered

    # Tensors, on their devices. Those of one type and device travel in one message.

    def broadcast(self, tensors: Iterable[Tensor], source: int = 0) -> None:
        """Replace every tensor, in place, by that of rank `source`."""
        for alike in _alike(tensors):
            message = _concatenated(alike)
            with _lost_if_it_fails():
                distributed.broadcast(message.view(torch.uint8), source)  # gloo and NCCL lack some types
            if self.identity.rank != source:
                _split(message, alike)

    def all_reduce_mean(self, tensors: Iterable[Tensor]) -> None:
        """Replace every tensor, in place, by the mean over all ranks."""
        for alike in _alike(tensors):
            message = _concatenated(alike)
            with _lost_if_it_fails():
                distributed.all_reduce(message)
            _split(message.div_(self.identity.world_size), alike)

    def begin_all_reduce_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to sum a tensor over all ranks; return a function that waits for the sum."""
        total = tensor.clone()
        with _lost_if_it_fails():
            work = distributed.all_reduce(total, async_op=True)

        def finish() -> Tensor:
            with _lost_if_it_fails():
                work.wait()
            return total

        return finish

    def data_parallel(self, model: nn.Module) -> nn.Module:
        """Return the model with a backward pass that averages gradients over all ranks while it runs.

        `static_graph`: parameters without a gradient are found in the first pass, and must be the same in all others.
        Buffers are left alone.
        """
        with _lost_if_it_fails(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # an argument is renamed in later versions
            return DistributedDataParallel(
                model, broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=True
            )

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Surround a backward pass, and raise RankLost if it fails because of another rank."""
        with _lost_if_it_fails():
            yield


def _alike(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Group tensors that can travel in one message: of one type, on one device."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    return found.values()


def _concatenated(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _split(message: Tensor, tensors: list[Tensor]) -> None:
    """Copy the parts of a message to the tensors that it was concatenated from."""
    for tensor, part in zip(tensors, message.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


@contextmanager
def _lost_if_it_fails() -> Iterator[None]:
    """Raise RankLost for an error of the connection to another rank; leave other errors alone."""
    try:
        yield
    except RuntimeError as error:  # torch has several kinds, and gloo none of its own
        if _is_of_connection(error):
            raise _lost(error) from error
        raise


def _lost(error: RuntimeError) -> RankLost:
    line = str(error).strip().splitlines()[0]
    words = re.sub(r"^\[\S+\] ", "", line).partition(". ")[0]  # without the place in C++ and without advice
    return RankLost(f"another rank is gone or has not answered for ranks.timeout seconds ({words})")


def _is_of_connection(error: RuntimeError) -> bool:
    is_of_meeting = isinstance(error, distributed.DistNetworkError | distributed.DistStoreError)
    return is_of_meeting or LOST.search(str(error)) is not None


def _layout(tensor: Tensor) -> Layout:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _empty(layout: Layout) -> Tensor:
    dtype, shape = layout
    return torch.empty(shape, dtype=getattr(torch, dtype))


def _encoded(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(encoded: Tensor) -> Json:  # type: ignore[type-var]
    value: Json = json.loads(bytes(encoded.tolist()))
    return value
