"""Training apart from serving: rank 0 records unrolls and sends train batches, rank 1 trains and sends weights back.

Both do their parts in the same order, device to device, one batch at a time: the next one waits in the store until the
weights of the last are served, so back-pressure and policy lag are those of one process. Knows nothing of streams.

    rank 0, RemoteLearner           rank 1, MirroredLearner with Inbox and Outbox
    train     sends a batch    →    trains on it
              shows numbers    ←    what it has counted
    publish   serves weights   ←    weights
                               →    a confirmation that they are served: by that rank 1 measures the publish lag
    tensors   writes them      ←    weights, optimiser and algorithm, for a checkpoint
"""

from typing import Any

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
    *("updates", "skipped_updates", "trained_steps", "unrolls_trained", "unroll_uses"),
    *("policy_lag", "publish_lag_seconds"),
)
SHOWN = ("grad_norm", "learning_rate")  # gauges
HERE = "checkpoint"  # the stage of the learner's time that is spent where checkpoints are written


class RemoteLearner:
    """Rank 0's stand-in for a learner that is elsewhere. Owned by the learner thread."""

    def __init__(self, ranks: Ranks, model: nn.Module, metrics: LearningMetrics) -> None:
        self.model = model  # what was published last
        self.skipped_in_a_row = 0
        self._ranks = ranks
        self._metrics = metrics
        self._has_sent = False

    def train(self, unrolls: Unrolls) -> None:
        """Have rank 1 train on a train batch."""
        tensors = _tensors(unrolls)
        if not self._has_sent:  # all batches have the form of the first
            self._ranks.share([_form(tensor) for tensor in tensors], SERVING)
            self._has_sent = True
        self._ranks.spread(tensors, SERVING)
        self._mirror(self._ranks.share({}, TRAINING))

    def assist(self, blank: Unrolls) -> None:
        raise AssertionError("the rank that serves has a train batch in every update")

    def publish(self, policy: Publisher) -> None:
        """Serve the weights that rank 1 has now."""
        self._ranks.spread(self.model.state_dict().values(), TRAINING)
        policy.publish(self.model, self._metrics.updates)
        self._ranks.spread([torch.zeros(1)], SERVING)

    def tensors(self) -> Tensors:
        return self._ranks.share_tensors({}, TRAINING)

    def load(self, tensors: Tensors) -> None:
        """Rank 1 loads them itself."""

    def sync(self) -> None:
        """There is one learner."""

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


class MirroredLearner:
    """Rank 1's learner: after every train batch it sends what it has counted, for rank 0 to show."""

    def __init__(self, ranks: Ranks, learner: Learner, metrics: LearningMetrics) -> None:
        self._ranks = ranks
        self._learner = learner
        self._metrics = metrics
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
        }
        self._ranks.share(counted, TRAINING)


class Inbox:
    """Where a learner at rank 1 takes its train batches from."""

    def __init__(self, ranks: Ranks, spec: EnvSpec, device: torch.device) -> None:
        self._ranks = ranks
        self._spec = spec
        self._device = device
        self._forms: list[list[Any]] = []  # of the tensors of a batch

    def wait_for(self, count: int, timeout: float) -> bool:
        """Rank 0 knows, and votes for an update in a round of agreement."""
        return True

    def take(self, count: int, timeout: float) -> Unrolls:
        self._forms = self._forms or self._ranks.share(self._forms, SERVING)
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if is_on_host else self._device)
            for dtype, shape, is_on_host in self._forms
        ]
        self._ranks.spread(tensors, SERVING)
        return _unrolls(self._spec, tensors)

    def blank(self, count: int) -> Unrolls:
        raise AssertionError("the rank that trains gets a train batch in every update")


class Outbox:
    """Where a learner at rank 1 publishes its weights."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def publish(self, model: nn.Module, version: int) -> None:
        """Return when rank 0 serves them."""
        self._ranks.spread(model.state_dict().values(), TRAINING)
        self._ranks.spread([torch.zeros(1)], SERVING)


def _form(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type == "cpu"]


def _tensors(unrolls: Unrolls) -> list[Tensor]:
    """Return what travels: every tensor, and what the host knows as further ones."""
    host = (unrolls.policy_version, *unrolls.ticket)
    return [*unrolls.tensors(), *map(torch.from_numpy, host)]


def _unrolls(spec: EnvSpec, tensors: list[Tensor]) -> Unrolls:
    """Return what `_tensors` has taken apart."""
    *on_device, version, entry, generation = tensors
    ticket = Ticket(entry.numpy(), generation.numpy())
    return Unrolls.of_tensors(spec.observation, on_device, version.numpy(), ticket)
