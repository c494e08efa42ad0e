"""Training apart from serving: rank 0 records unrolls and sends train batches, rank 1 trains and sends weights back.

Both take their steps in the same order, device to device, one train batch at a time: the next one waits in the store
until the weights of the last are served, so back-pressure and policy lag are those of one process. Knows no streams.

    rank 0, RemoteLearner           rank 1, MirroredLearner with Inbox and Outbox
    train     sends a batch    →    trains on it
              shows counters   ←    sends its counters, and priorities for the store
    publish   serves weights   ←    sends weights
              confirms that    →    measures the publish lag
    tensors   writes them      ←    sends weights, optimiser and algorithm for a checkpoint
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from seedrl.learning.learner import PATIENCE, Learner, Publisher
from seedrl.metrics import LearningMetrics, restore_totals, totals_of
from seedrl.ranks.group import Ranks
from seedrl.run.checkpoint import Tensors
from seedrl.specs import EnvSpec
from seedrl.types import Ticket, Unrolls

SERVING, TRAINING = 0, 1  # ranks
COUNTED = (
    *("updates", "gradient_steps", "skipped_updates", "trained_steps", "unrolls_trained", "unroll_uses"),
    *("policy_lag", "publish_lag_seconds"),
)
SHOWN = ("grad_norm", "learning_rate")  # gauges
HERE = "checkpoint"  # the stage of the learner's time that is spent where checkpoints are written


class RemoteLearner:
    """The learner as rank 0 sees it, which is on rank 1. Owned by the learner thread."""

    def __init__(
        self, ranks: Ranks, model: nn.Module, metrics: LearningMetrics, prefer: Callable[[Ticket, Tensor], None]
    ) -> None:
        """`prefer` takes the priorities of the unrolls trained on."""
        self.model = model  # with the weights that were published last
        self.skipped_in_a_row = 0
        self._ranks = ranks
        self._metrics = metrics
        self._prefer = prefer
        self._has_sent = False

    def train(self, unrolls: Unrolls) -> None:
        """Let rank 1 train on a train batch."""
        tensors = _tensors(unrolls)
        if not self._has_sent:  # all batches have the layout of the first
            self._ranks.broadcast_object([_layout(tensor) for tensor in tensors], SERVING)
            self._has_sent = True
        self._ranks.broadcast(tensors, SERVING)
        self._mirror(self._ranks.broadcast_object({}, TRAINING))

    def assist(self, blank: Unrolls) -> None:
        raise AssertionError("rank 0 has a train batch in every update")

    def publish(self, policy: Publisher) -> None:
        """Serve the weights that rank 1 has now."""
        self._ranks.broadcast(self.model.state_dict().values(), TRAINING)
        policy.publish(self.model, self._metrics.updates)
        self._ranks.broadcast([torch.zeros(1)], SERVING)

    def tensors(self) -> Tensors:
        return self._ranks.broadcast_tensors({}, TRAINING)

    def load(self, tensors: Tensors) -> None:
        """Rank 1 loads them itself."""

    def sync(self) -> None:
        """Do nothing: there is one learner."""

    @property
    def has_diverged(self) -> bool:
        return self.skipped_in_a_row >= PATIENCE

    def _mirror(self, counted: dict[str, Any]) -> None:
        metrics = self._metrics
        restore_totals(metrics, counted["counted"])
        metrics.algorithm.update(counted["algorithm"])
        for name in SHOWN:
            setattr(metrics, name, counted["shown"][name])
        self.skipped_in_a_row = counted["skipped_in_a_row"]
        for entry, generation, priority in counted["preferred"]:
            self._prefer(Ticket(np.array(entry, np.int64), np.array(generation, np.int64)), torch.tensor(priority))


class Preferences:
    """The priorities of a train batch on their way to the store of rank 0. Owned by the main thread of rank 1."""

    def __init__(self) -> None:
        self._noted: list[list[list[float]]] = []

    def prefer(self, ticket: Ticket, priority: Tensor) -> None:
        """Note the new priorities [B] of unrolls."""
        self._noted.append([ticket.entry.tolist(), ticket.generation.tolist(), priority.tolist()])

    def taken(self) -> list[list[list[float]]]:
        """Return entries, generations and priorities of each gradient step since the last call."""
        noted, self._noted = self._noted, []
        return noted


class MirroredLearner:
    """Rank 1's learner, which sends its counters after every train batch. Owned by the main thread of rank 1."""

    def __init__(self, ranks: Ranks, learner: Learner, metrics: LearningMetrics, preferences: Preferences) -> None:
        """`preferences` are what the learner hands its priorities to."""
        self._ranks = ranks
        self._learner = learner
        self._metrics = metrics
        self._preferences = preferences
        self.assist, self.publish = learner.assist, learner.publish

    @property
    def skipped_in_a_row(self) -> int:
        return self._learner.skipped_in_a_row

    @property
    def has_diverged(self) -> bool:
        return self._learner.has_diverged

    def train(self, unrolls: Unrolls) -> None:
        self._learner.train(unrolls)
        totals = totals_of(self._metrics)
        seconds = {stage: value for stage, value in totals["learner_seconds"].items() if stage != HERE}
        counted = {
            "counted": {**{name: totals[name] for name in COUNTED}, "learner_seconds": seconds},
            "algorithm": dict(self._metrics.algorithm),
            "shown": {name: getattr(self._metrics, name) for name in SHOWN},
            "skipped_in_a_row": self.skipped_in_a_row,
            "preferred": self._preferences.taken(),
        }
        self._ranks.broadcast_object(counted, TRAINING)


class Inbox:
    """The source of train batches on rank 1. Owned by the main thread of rank 1."""

    def __init__(self, ranks: Ranks, spec: EnvSpec, device: torch.device) -> None:
        self._ranks = ranks
        self._spec = spec
        self._device = device
        self._layouts: list[list[Any]] = []  # types and shapes of the tensors of a batch

    def wait_for(self, count: int, timeout: float) -> bool:
        """Return true: whether there is an update depends on the vote of rank 0."""
        return True

    def take(self, count: int, timeout: float) -> Unrolls:
        self._layouts = self._layouts or self._ranks.broadcast_object(self._layouts, SERVING)
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if is_on_host else self._device)
            for dtype, shape, is_on_host in self._layouts
        ]
        self._ranks.broadcast(tensors, SERVING)
        return _unrolls(self._spec, tensors)

    def blank(self, count: int) -> Unrolls:
        raise AssertionError("rank 1 receives a train batch in every update")


class Outbox:
    """The publisher on rank 1, which sends the weights to rank 0. Owned by the main thread of rank 1."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def publish(self, model: nn.Module, version: int) -> None:
        """Return when rank 0 serves them."""
        self._ranks.broadcast(model.state_dict().values(), TRAINING)
        self._ranks.broadcast([torch.zeros(1)], SERVING)


def _layout(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type == "cpu"]


def _tensors(unrolls: Unrolls) -> list[Tensor]:
    """Return every tensor of a train batch, and its arrays on the host as further ones."""
    host = (unrolls.policy_version, *unrolls.ticket)
    return [*unrolls.tensors(), *map(torch.from_numpy, host)]


def _unrolls(spec: EnvSpec, tensors: list[Tensor]) -> Unrolls:
    """Return the train batch that has these tensors; the inverse of `_tensors`."""
    *on_device, version, entry, generation = tensors
    ticket = Ticket(entry.numpy(), generation.numpy())
    return Unrolls.of_tensors(spec.observation, on_device, version.numpy(), ticket)
