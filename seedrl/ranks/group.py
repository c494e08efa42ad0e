"""The learner processes that train one model together, and how they talk: by torch.distributed, started by torchrun.

Knows nothing of what is said or trained. One rank alone has no group and touches nothing of torch.distributed. Nothing
is pickled: words travel as JSON.

Whatever is said here is said by *all* ranks, in the same order, in one thread at a time. If another rank is gone, or
says nothing for `ranks.timeout` seconds, that ends in RankLost.
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
from torch.nn.parallel import DistributedDataParallel

from seedrl.errors import RankLost
from seedrl.run.identity import ALONE, Identity

Words = TypeVar("Words")  # JSON
Form = tuple[str, list[int]]  # type and shape of a tensor


class Ranks:
    """This process among those it trains with. Owned by the main thread, and by the learner thread while that runs."""

    def __init__(self, identity: Identity = ALONE) -> None:
        self.identity = identity

    @classmethod
    def join(cls, identity: Identity, device: torch.device, timeout: float) -> "Ranks":
        """Waits for the others; where they meet is told by the environment that torchrun has made."""
        ranks = cls(identity)
        if not ranks.is_alone:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            with _lost_if_it_fails():
                distributed.init_process_group(
                    backend,
                    rank=identity.rank,
                    world_size=identity.world_size,
                    timeout=timedelta(seconds=timeout),
                    device_id=torch.device("cuda", device.index or 0) if device.type == "cuda" else None,
                )
        return ranks

    def leave(self) -> None:
        if not self.is_alone and distributed.is_initialized():
            distributed.destroy_process_group()

    @property
    def is_alone(self) -> bool:
        return self.identity.world_size == 1

    @property
    def is_first(self) -> bool:
        return self.identity.is_first

    # Words, through the host.

    def share(self, words: Words, source: int = 0) -> Words:
        """What one rank says, to all; what the others would say is ignored."""
        if self.is_alone:
            return words
        is_source = self.identity.rank == source
        encoded = _encoded(words) if is_source else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(encoded)])
        self.spread([size], source)
        encoded = encoded if is_source else torch.empty(int(size), dtype=torch.uint8)
        self.spread([encoded], source)
        return words if is_source else _decoded(encoded)

    def gather(self, words: Words) -> list[Words]:
        """What each of them says, by rank."""
        if self.is_alone:
            return [words]
        encoded = _encoded(words)
        sizes = [int(size) for (size,) in self.gather_rows([len(encoded)])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(encoded)] = encoded
        return [_decoded(said[:size]) for said, size in zip(self._gathered(padded), sizes, strict=True)]

    def gather_rows(self, row: Sequence[float]) -> list[list[float]]:
        """A few numbers of each rank, of the same length everywhere. Whole ones are exact up to 2**53."""
        if self.is_alone:
            return [list(row)]
        return [said.tolist() for said in self._gathered(torch.tensor(row, dtype=torch.float64))]

    def share_tensors(self, tensors: Mapping[str, Tensor], source: int = 0) -> dict[str, Tensor]:
        """Those of one rank, to all; the others need not know what there is. They arrive on the host."""
        if self.is_alone:
            return dict(tensors)
        host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        layout = self.share({name: _form(tensor) for name, tensor in host.items()}, source)
        if self.identity.rank != source:
            host = {name: _empty(form) for name, form in layout.items()}
        self.spread((host[name] for name in layout), source)
        return host

    def _gathered(self, own: Tensor) -> list[Tensor]:
        said = [torch.empty_like(own) for _ in range(self.identity.world_size)]
        with _lost_if_it_fails():
            distributed.all_gather(said, own)
        return said

    # Tensors, where they are.

    def spread(self, tensors: Iterable[Tensor], source: int = 0) -> None:
        """Makes every tensor, in place, what it is at one rank; those of one type travel in one piece."""
        for alike in _alike(() if self.is_alone else tensors):
            piece = _joined(alike)
            with _lost_if_it_fails():
                distributed.broadcast(piece.view(torch.uint8) if piece.dtype is torch.bool else piece, source)
            if self.identity.rank != source:
                _split(piece, alike)

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Makes every tensor, in place, the mean over all ranks; those of one type travel in one piece."""
        for alike in _alike(() if self.is_alone else tensors):
            piece = _joined(alike)
            with _lost_if_it_fails():
                distributed.all_reduce(piece)
            _split(piece.div_(self.identity.world_size), alike)

    def begin_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """The sum over all ranks of a tensor, which is on its way meanwhile; the function returned waits for it."""
        total = tensor.clone()
        with _lost_if_it_fails():
            work = distributed.all_reduce(total, async_op=True)

        def finish() -> Tensor:
            with _lost_if_it_fails():
                work.wait()
            return total

        return finish

    def averaging(self, model: nn.Module) -> nn.Module:
        """A model like this one whose backward pass averages gradients over all ranks, while it goes on.

        `static_graph`: parameters without a gradient are found in the first pass, and always have to be the same.
        Buffers are not its business.
        """
        with _lost_if_it_fails(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the name of an argument changes, in versions to come
            return DistributedDataParallel(
                model, broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=True
            )

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward pass: a rank lost in it is told from any other error."""
        try:
            yield
        except RuntimeError as error:
            if _is_of_transport(error):
                raise _lost(error) from error
            raise


def _alike(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Those that can travel in one piece: of one type, and in one place."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    return found.values()


def _joined(tensors: list[Tensor]) -> Tensor:
    """A copy, in one piece."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _split(piece: Tensor, tensors: list[Tensor]) -> None:
    """What `_joined` has joined, back in place."""
    for tensor, part in zip(tensors, piece.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


@contextmanager
def _lost_if_it_fails() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch has several kinds, and gloo none of its own
        raise _lost(error) from error


def _lost(error: RuntimeError) -> RankLost:
    said = str(error).strip().splitlines()[0]
    words = re.sub(r"^\[\S+\] ", "", said).partition(". ")[0]  # without the place in C++ and without advice
    return RankLost(f"another rank is gone or has said nothing for ranks.timeout seconds ({words})")


def _is_of_transport(error: RuntimeError) -> bool:
    is_named = any(name in str(error) for name in ("gloo", "Gloo", "NCCL", "Connection closed by peer"))
    return isinstance(error, distributed.DistError) or is_named


def _form(tensor: Tensor) -> Form:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _empty(form: Form) -> Tensor:
    dtype, shape = form
    return torch.empty(shape, dtype=getattr(torch, dtype))


def _encoded(words: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(words).encode()), dtype=torch.uint8)


def _decoded(encoded: Tensor) -> Words:  # type: ignore[type-var]
    words: Words = json.loads(bytes(encoded.tolist()))
    return words
