"""The bank: policies that act besides the one that is trained. They are snapshots of it, or policies of other runs.

An entry never changes: it is a copy of weights on the device, with a number that is never given again. Knows nothing of
who plays against whom (serving/league.py), nor when weights are published.
"""

import copy
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from seedrl.device import finish
from seedrl.models.precision import replica_weights

CURRENT = 0  # the number of the policy that is trained, which is no entry
SPARE = 2  # snapshots beyond the limit, while games against those that make room are not over


class Entry(NamedTuple):
    """A frozen policy."""

    number: int
    name: str
    version: int  # updates of its run when it was frozen
    model: nn.Module
    is_snapshot: bool = True  # of this run; only those make room for newer ones


class Publisher(Protocol):
    """The destination of published weights."""

    def publish(self, model: nn.Module, version: int) -> None: ...


class Bank:
    """Thread-safe. The learner thread freezes snapshots; the server thread reads entries and drops those in surplus."""

    def __init__(self, model: nn.Module, snapshots: int, every: int) -> None:
        """`model` is what snapshots look like; `every` is how many updates lie between two of them, 0 for none."""
        self._template = copy.deepcopy(model).requires_grad_(False).eval()
        replica_weights(self._template)
        self._most = snapshots
        self._every = every
        self._lock = threading.Lock()
        self._next = CURRENT + 1
        self.entries: tuple[Entry, ...] = ()  # oldest first; replaced as a whole

    def add(self, name: str, version: int, model: nn.Module, is_snapshot: bool = False) -> Entry:
        """Add a policy that is not changed any more."""
        with self._lock:
            entry = Entry(self._next, name, version, model.requires_grad_(False).eval(), is_snapshot)
            self._next += 1
            self.entries = (*self.entries, entry)
        return entry

    def freeze_if_due(self, model: nn.Module, version: int) -> None:
        """Freeze a copy if there is none yet, or enough updates since the last; not while surplus ones still play."""
        versions = [entry.version for entry in self.entries if entry.is_snapshot]
        is_due = self._every > 0 and (not versions or version >= versions[-1] + self._every)
        if is_due and len(versions) < self._most + SPARE:
            self.add(f"update {version}", version, self._copy(model.state_dict()), is_snapshot=True)

    @torch.no_grad()
    def _copy(self, source: Mapping[str, Tensor]) -> nn.Module:
        """Copy weights, device to device."""
        frozen = copy.deepcopy(self._template)
        target = frozen.state_dict()
        device = next(iter(target.values())).device
        torch._foreach_copy_([target[name] for name in source], list(source.values()))
        finish(device)  # before inference reads it
        return frozen

    def drop_surplus(self, in_use: Collection[int]) -> None:
        """Drop snapshots above the limit that play no game, so that those left are spread over the run."""
        with self._lock:
            while (number := self._surplus(in_use)) is not None:
                self.entries = tuple(entry for entry in self.entries if entry.number != number)

    def _surplus(self, in_use: Collection[int]) -> int | None:
        """Return the snapshot whose neighbours are closest; neither the first nor the newest ones that may be spare."""
        snapshots = [entry for entry in self.entries if entry.is_snapshot]
        if len(snapshots) <= self._most:
            return None
        inner = range(1, len(snapshots) - 1) if self._most > 1 else range(len(snapshots) - 1)
        gaps = [
            (snapshots[at + 1].version - snapshots[max(0, at - 1)].version, snapshots[at].number)
            for at in inner
            if snapshots[at].number not in in_use
        ]
        return min(gaps)[1] if gaps else None

    # What a checkpoint needs of it.

    def state(self) -> list[dict[str, Any]]:
        """Return the snapshots as plain JSON values."""
        return [
            {"number": entry.number, "name": entry.name, "version": entry.version}
            for entry in self.entries
            if entry.is_snapshot
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights of the snapshots; entry 3 has names such as 3/encoder.weight."""
        return {
            f"{entry.number}/{name}": tensor
            for entry in self.entries
            if entry.is_snapshot
            for name, tensor in entry.model.state_dict().items()
        }

    def load(self, state: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> None:
        """Restore the snapshots; policies of other runs, which were added before, get the numbers after them."""
        others = [entry for entry in self.entries if not entry.is_snapshot]
        snapshots = []
        for each in state:
            number = int(each["number"])
            prefix = f"{number}/"
            own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            snapshots.append(Entry(number, str(each["name"]), int(each["version"]), self._copy(own)))
        with self._lock:
            self.entries = (*others, *snapshots)
            self._next = max([self._next, *(entry.number + 1 for entry in self.entries)])


class Freezing:
    """Publishes weights, and freezes a copy of them where one is due. Owned by the learner thread."""

    def __init__(self, policy: Publisher, bank: Bank) -> None:
        self._policy = policy
        self._bank = bank

    def publish(self, model: nn.Module, version: int) -> None:
        self._policy.publish(model, version)
        self._bank.freeze_if_due(model, version)
