"""One update after another: unrolls in, weights out. Knows nothing of streams, sessions or files."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from seedrl.config import LearnerConfig
from seedrl.learning.losses import LossParts, vtrace_loss
from seedrl.learning.optimizer import build_optimizer, clip_gradients, linear
from seedrl.metrics import LearningMetrics
from seedrl.policy import Policy
from seedrl.store import Store
from seedrl.types import Unrolls

REPORT_EVERY = 10  # updates between copies of the losses to the host


class Learner:
    """Owned by the learner thread."""

    def __init__(
        self,
        config: LearnerConfig,
        model: nn.Module,
        store: Store,
        policy: Policy,
        metrics: LearningMetrics,
        env_steps: Callable[[], int],
    ) -> None:
        self._config = config
        self._store = store
        self._policy = policy
        self._metrics = metrics
        self._env_steps = env_steps
        self.model = model
        self.optimizer = build_optimizer(config.algorithm, model.parameters())

    def update(self, timeout: float) -> bool:
        """Trains on the next train batch; false if there was none before the timeout. `publish` makes it count."""
        began = time.monotonic()
        unrolls = self._store.take(self._config.algorithm.batch_size, timeout)
        taken = time.monotonic()
        self._metrics.wait_seconds += taken - began
        if unrolls is None:
            return False
        self._train(unrolls)
        self._metrics.busy_seconds += time.monotonic() - taken
        return True

    def publish(self) -> None:
        """Serves the trained weights. The version is the number of updates."""
        self._policy.publish(self.model, self._metrics.updates)

    def _train(self, unrolls: Unrolls) -> None:
        algorithm, metrics = self._config.algorithm, self._metrics
        fraction = self._env_steps() / self._config.stop.env_steps
        self._set_learning_rate(linear(algorithm.learning_rate, algorithm.learning_rate_end, fraction))
        entropy_cost = linear(algorithm.entropy_cost, algorithm.entropy_cost_end, fraction)

        output, _ = self.model(unrolls.inputs, unrolls.core_state)
        parts = vtrace_loss(unrolls, output, algorithm, entropy_cost)
        self.optimizer.zero_grad(set_to_none=True)
        parts.total.backward()
        grad_norm = clip_gradients(self.model.parameters(), algorithm.max_grad_norm)
        if torch.isfinite(grad_norm):
            self.optimizer.step()
        else:
            metrics.skipped_updates += 1

        metrics.policy_lag_sum += float((metrics.updates - unrolls.policy_version[:-1]).mean())
        metrics.trained_steps += unrolls.action[1:].numel()
        metrics.updates += 1
        if metrics.updates % REPORT_EVERY == 1:
            metrics.losses = _to_host(parts, grad_norm)

    def _set_learning_rate(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value


def _to_host(parts: LossParts, grad_norm: Tensor) -> dict[str, float]:
    values = torch.stack([part.detach() for part in parts] + [grad_norm]).tolist()
    return dict(zip([*LossParts._fields, "grad_norm"], values, strict=True))
