"""One update after another: unrolls in, weights out. Knows nothing of streams, sessions or files."""

import time
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.config import LearnerConfig
from seedrl.learning.losses import LossParts, vtrace_loss
from seedrl.learning.optimizer import build_optimizer, clip_gradients, linear
from seedrl.metrics import LearningMetrics, Stopwatch
from seedrl.models.base import popart_of
from seedrl.ranks.averaging import Averager
from seedrl.ranks.group import Ranks
from seedrl.run.checkpoint import Tensors, pack_optimizer, with_prefix
from seedrl.types import Unrolls

REPORT_EVERY = 10  # updates between copies of the losses to the host
PATIENCE = 10  # updates in a row that may be skipped


class Source(Protocol):
    """Where train batches come from: the store, or whoever has it."""

    def wait_for(self, count: int, timeout: float) -> bool: ...

    def take(self, count: int, timeout: float) -> Unrolls | None: ...


class Publisher(Protocol):
    """Who serves the weights: the policy, or whoever has it."""

    def publish(self, model: nn.Module, version: int) -> None: ...


class Learner:
    """Owned by the learner thread."""

    def __init__(
        self,
        config: LearnerConfig,
        model: nn.Module,
        actions: Actions,
        store: Source,
        policy: Publisher,
        metrics: LearningMetrics,
        env_steps: Callable[[], int],
        ranks: Ranks | None = None,
    ) -> None:
        """`env_steps` is of all ranks, and the same for all of them in one update."""
        self._config = config
        self._actions = actions
        self._store = store
        self._policy = policy
        self._metrics = metrics
        self._env_steps = env_steps
        self.model = model
        self._together = Averager(ranks or Ranks(), model, config.ranks.sync_every)
        self._popart = popart_of(model)
        self.skipped_in_a_row = 0  # updates, up to the newest
        self.optimizer = build_optimizer(config.algorithm, model.parameters())
        self._stepped: float | None = None  # when, since the weights were last published

    def has_batch(self, timeout: float) -> bool:
        """Whether there is a train batch before the timeout."""
        timer = Stopwatch(self._metrics.learner_seconds)
        has_batch = self._store.wait_for(self._config.algorithm.batch_size, timeout)
        timer.lap("wait")
        return has_batch

    def update(self, timeout: float = 0.0) -> bool:
        """Trains on the next train batch; false if there was none before the timeout. `publish` makes it count.

        An update is one of all ranks; those without a train batch `assist`.

        Several passes over one batch are as many updates; V-trace corrects for the older ones.
        """
        if not self.has_batch(timeout):
            return False
        timer = Stopwatch(self._metrics.learner_seconds)
        unrolls = self._store.take(self._config.algorithm.batch_size, timeout=0)
        assert unrolls is not None  # nobody else takes any
        timer.lap("gather")
        metrics = self._metrics
        for _ in range(self._config.algorithm.passes):
            metrics.policy_lag.observe_all(metrics.updates - unrolls.policy_version[:-1])
            self._train(unrolls, timer)
            metrics.unroll_uses += unrolls.terminated.shape[1]
        metrics.trained_steps += unrolls.terminated[1:].numel()
        metrics.unrolls_trained += unrolls.terminated.shape[1]
        return True

    def assist(self, blank: Unrolls) -> None:
        """Takes part in an update of the other ranks, with unrolls that count for nothing."""
        timer = Stopwatch(self._metrics.learner_seconds)
        for _ in range(self._config.algorithm.passes):
            self._train(blank, timer)

    def publish(self) -> None:
        """Serves the trained weights. The version is the number of updates."""
        timer = Stopwatch(self._metrics.learner_seconds)
        self._policy.publish(self.model, self._metrics.updates)
        now = timer.lap("publish")
        if self._stepped is not None:
            self._metrics.publish_lag_seconds.observe(now - self._stepped)
            self._stepped = None

    def _train(self, unrolls: Unrolls, timer: Stopwatch) -> None:
        algorithm, metrics = self._config.algorithm, self._metrics
        fraction = self._env_steps() / self._config.stop.env_steps
        metrics.learning_rate = linear(algorithm.learning_rate, algorithm.learning_rate_end, fraction)
        entropy_cost = linear(algorithm.entropy_cost, algorithm.entropy_cost_end, fraction)
        for group in self.optimizer.param_groups:
            group["lr"] = metrics.learning_rate

        weigh = self._together.weigh(unrolls)
        output, _ = self._together.model(unrolls.inputs, unrolls.core_state)
        unit = self._popart.unit if self._popart else 1.0
        parts = weigh(vtrace_loss(unrolls, output, self._actions, algorithm, entropy_cost, unit))
        timer.lap("forward")
        self.optimizer.zero_grad(set_to_none=True)
        self._together.backward(parts.total)
        grad_norm = clip_gradients(self.model.parameters(), algorithm.max_grad_norm)
        parts, grad_norm = self._together.agree(parts, grad_norm)
        timer.lap("backward")
        self._step_if_finite(parts, grad_norm)

        metrics.updates += 1
        self._stepped = time.monotonic()
        self._together.sync(metrics.updates)
        if metrics.updates % REPORT_EVERY == 1:
            self._report(parts, grad_norm, entropy_cost)
        timer.lap("optimize")

    def _step_if_finite(self, parts: LossParts, grad_norm: Tensor) -> None:
        """The weights are finite and stay so: an update that would change that is left out."""
        if torch.isfinite(parts.total + grad_norm):
            self.optimizer.step()
            if self._popart:
                self._popart.rescale(parts.target_mean, parts.target_square)
            self.skipped_in_a_row = 0
        else:
            self._metrics.skipped_updates += 1
            self.skipped_in_a_row += 1

    def tensors(self) -> Tensors:
        """What a checkpoint needs of it."""
        return {
            **with_prefix("model", dict(self.model.state_dict())),
            **with_prefix("optimizer", pack_optimizer(self.optimizer)),
        }

    def sync(self) -> None:
        """Makes the weights those of all ranks, which they are not after every update of one's own."""
        self._together.sync()

    @property
    def has_diverged(self) -> bool:
        return self.skipped_in_a_row >= PATIENCE

    def _report(self, parts: LossParts, grad_norm: Tensor, entropy_cost: float) -> None:
        """Copies to the host what people want to see of an update."""
        values = torch.stack([part.detach() for part in parts] + [grad_norm]).tolist()
        host = dict(zip([*LossParts._fields, "grad_norm"], values, strict=True))
        losses = {"loss": host["total"], "policy_loss": host["policy"], "value_loss": host["value"]}
        others = {name: host[name] for name in ("entropy", "kl", "clipped_rho")}
        self._metrics.algorithm.update({**losses, **others, "entropy_cost": entropy_cost})
        self._metrics.grad_norm = host["grad_norm"]
