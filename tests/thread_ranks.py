"""Ranks as threads of one process, for tests that need several ranks but no gloo.

    every(2, lambda ranks: ranks.all_gather_object(ranks.identity.rank))  →  [[0, 1], [0, 1]]

A rank that calls another operation than the others, or none within `SECONDS`, fails the test instead of hanging it.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor, nn

from seedrl.ranks.group import Json, Ranks
from seedrl.run.identity import Identity

SECONDS = 30.0

Result = TypeVar("Result")


class ThreadRanks(Ranks):
    """One rank; `slots` and `barrier` are shared by all."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(Identity("learner", rank=rank, world_size=len(slots)))
        self._slots = slots
        self.barrier = barrier

    def broadcast_object(self, value: Json, source: int = 0) -> Json:
        result: Json = self._exchange(("broadcast_object", source), value)[source]
        return result

    def all_gather_object(self, value: Json) -> list[Json]:
        return self._exchange("all_gather_object", value)

    def all_gather_numbers(self, row: Sequence[float]) -> list[list[float]]:
        return self._exchange("all_gather_numbers", list(row))

    def all_reduce_mean(self, tensors: Iterable[Tensor]) -> None:
        own = [tensor.detach() for tensor in tensors]
        rows = self._exchange("all_reduce_mean", [tensor.clone() for tensor in own])
        for tensor, column in zip(own, zip(*rows, strict=True), strict=True):
            tensor.copy_(sum(column) / len(column))

    def begin_all_reduce_sum(self, tensor: Tensor) -> Callable[[], Tensor]:
        total: Tensor = sum(self._exchange("all_reduce_sum", tensor.clone()))  # type: ignore[assignment]
        return lambda: total

    def data_parallel(self, model: nn.Module) -> nn.Module:
        """Return the model as it is: gradients are not averaged."""
        return model

    def _exchange(self, operation: object, value: Any) -> list[Any]:
        self._slots[self.identity.rank] = operation, value
        self.barrier.wait(SECONDS)
        operations, values = zip(*self._slots, strict=True)
        self.barrier.wait(SECONDS)
        assert set(operations) == {operation}, operations
        return list(values)


def every(world: int, work: Callable[[ThreadRanks], Result]) -> list[Result]:
    """Let every rank do the work in a thread of its own; return the results by rank."""
    slots, barrier = [None] * world, threading.Barrier(world)

    def guarded(rank: int) -> Result:
        try:
            return work(ThreadRanks(rank, slots, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(world)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    first = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)] or errors
    if first:
        raise first[0]
    return [future.result() for future in futures]
