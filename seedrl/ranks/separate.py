"""Training apart from serving: rank 0 records unrolls and sends train batches, rank 1 trains and sends weights back.

Both do their parts in the same order, device to device, one batch at a time: the next one waits in the store until the
weights of the last are served, so back-pressure and policy lag are those of one process. Knows nothing of streams.

    rank 0, RemoteLearner                 rank 1, Learner with Inbox and Outbox
    update    takes a batch    →    trains on it
              shows numbers    ←    what it has counted
    publish   serves weights   ←    weights
                               →    that they are served: by that rank 1 measures the publish lag
    tensors   writes them down ←    weights and optimiser, for a checkpoint
"""

from typing import Any

import torch
from torch import Tensor, nn

from seedrl.learning.learner import PATIENCE
from seedrl.metrics import LearningMetrics, restore_totals, totals_of
from seedrl.policy import Policy
from seedrl.ranks.group import Ranks
from seedrl.run.checkpoint import Tensors
from seedrl.specs import EnvSpec, as_tree, leaves
from seedrl.store import Store
from seedrl.types import ModelInput, Unrolls

SERVING, TRAINING = 0, 1  # ranks
COUNTED = (
    *("updates", "skipped_updates", "trained_steps", "unrolls_trained", "unroll_uses"),
    *("policy_lag", "publish_lag_seconds"),
)
SHOWN = ("grad_norm", "learning_rate")  # gauges
HERE = "checkpoint"  # the stage of the learner's time that is spent where checkpoints are written


class RemoteLearner:
    """Rank 0's stand-in for a learner that is elsewhere. Owned by the learner thread."""

    def __init__(
        self, ranks: Ranks, model: nn.Module, store: Store, policy: Policy, metrics: LearningMetrics, batch_size: int
    ) -> None:
        self.model = model  # what was published last
        self.optimizer: torch.optim.Optimizer | None = None
        self.skipped_in_a_row = 0
        self._ranks = ranks
        self._store = store
        self._policy = policy
        self._metrics = metrics
        self._batch_size = batch_size
        self._has_sent = False

    def has_batch(self, timeout: float) -> bool:
        return self._store.wait_for(self._batch_size, timeout)

    def update(self) -> bool:
        """Has rank 1 train on the next train batch."""
        unrolls = self._store.take(self._batch_size, timeout=0)
        assert unrolls is not None  # it was asked before
        tensors = _flat(unrolls)
        if not self._has_sent:  # all batches have the form of the first
            self._ranks.share([_form(tensor) for tensor in tensors], SERVING)
            self._has_sent = True
        self._ranks.spread(tensors, SERVING)
        self._mirror(self._ranks.share({}, TRAINING))
        return True

    def publish(self) -> None:
        """Serves the weights that rank 1 has now."""
        self._ranks.spread(self.model.state_dict().values(), TRAINING)
        self._policy.publish(self.model, self._metrics.updates)
        self._ranks.spread([torch.zeros(1)], SERVING)

    def tensors(self) -> Tensors:
        return self._ranks.share_tensors({}, TRAINING)

    def sync(self) -> None:
        """There is one learner."""

    @property
    def has_diverged(self) -> bool:
        return self.skipped_in_a_row >= PATIENCE

    def _mirror(self, told: dict[str, Any]) -> None:
        metrics = self._metrics
        restore_totals(metrics, told["counted"])
        metrics.algorithm.update(told["algorithm"])
        for name in SHOWN:
            setattr(metrics, name, told["shown"][name])
        self.skipped_in_a_row = told["skipped_in_a_row"]


class Inbox:
    """Where a learner at rank 1 takes its train batches from."""

    def __init__(self, ranks: Ranks, spec: EnvSpec, device: torch.device) -> None:
        self._ranks = ranks
        self._spec = spec
        self._device = device
        self._forms: list[list[Any]] = []  # of the tensors of a batch

    def wait_for(self, count: int, timeout: float) -> bool:
        """Rank 0 knows, and says so in a round of agreement."""
        return True

    def take(self, count: int, timeout: float) -> Unrolls:
        self._forms = self._forms or self._ranks.share(self._forms, SERVING)
        tensors = [
            torch.empty(shape, dtype=getattr(torch, dtype), device="cpu" if is_on_host else self._device)
            for dtype, shape, is_on_host in self._forms
        ]
        self._ranks.spread(tensors, SERVING)
        return _unflat(self._spec, tensors)


class Outbox:
    """Whom a learner at rank 1 publishes to."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def publish(self, model: nn.Module, version: int) -> None:
        """Returns when rank 0 serves them."""
        self._ranks.spread(model.state_dict().values(), TRAINING)
        self._ranks.spread([torch.zeros(1)], SERVING)


def tell(ranks: Ranks, metrics: LearningMetrics, skipped_in_a_row: int) -> None:
    """What rank 1 has counted so far, after every update: rank 0 shows it."""
    totals = totals_of(metrics)
    seconds = {stage: value for stage, value in totals["learner_seconds"].items() if stage != HERE}
    words = {
        "counted": {**{name: totals[name] for name in COUNTED}, "learner_seconds": seconds},
        "algorithm": dict(metrics.algorithm),
        "shown": {name: getattr(metrics, name) for name in SHOWN},
        "skipped_in_a_row": skipped_in_a_row,
    }
    ranks.share(words, TRAINING)


def _form(tensor: Tensor) -> list[Any]:
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.device.type == "cpu"]


def _flat(unrolls: Unrolls) -> list[Tensor]:
    observation, *inputs = unrolls.inputs
    version = torch.from_numpy(unrolls.policy_version)
    others = unrolls.terminated, unrolls.truncated, unrolls.action, unrolls.behavior_logits, unrolls.behavior_value
    return [*leaves(observation), *inputs, *others, version, unrolls.core_state]


def _unflat(spec: EnvSpec, tensors: list[Tensor]) -> Unrolls:
    count = len(spec.observations)
    reward, last_action, reset, terminated, truncated, action, logits, value, version, core_state = tensors[count:]
    inputs = ModelInput(as_tree(spec.observation, tensors[:count]), reward, last_action, reset)
    return Unrolls(inputs, terminated, truncated, action, logits, value, version.numpy(), core_state)
