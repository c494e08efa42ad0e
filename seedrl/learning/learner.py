"""The update: a train batch in, changed weights out. Knows nothing of streams, files, or where batches come from."""

import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from seedrl.algorithms.auxiliary import whole_loss
from seedrl.algorithms.base import Algorithm, Batch, Loss, networks_of
from seedrl.algorithms.check import check_loss
from seedrl.algorithms.settings import Optimizer
from seedrl.algorithms.transitions import linear
from seedrl.config import LearnerConfig
from seedrl.device import is_accelerator
from seedrl.learning.optimizer import build_optimizer, clip_gradients
from seedrl.learning.reporting import LateReport, numbers_of, report
from seedrl.metrics import LearningMetrics, Stopwatch
from seedrl.models.compilation import compile_forward
from seedrl.models.statistics import apply_statistics, discard_statistics, staged_statistics
from seedrl.run.checkpoint import Tensors, pack_optimizer, unpack_optimizer, with_prefix, without_prefix
from seedrl.types import Ticket, Unrolls

REPORT_EVERY = 10  # updates between copies of the losses to the host
PATIENCE = 10  # updates in a row that may be skipped

Weigh = Callable[[Loss], Loss]


class Averager(Protocol):
    """Makes the updates of several ranks one (seedrl/ranks/averaging.py); a single rank has `NoAverager`."""

    model: nn.Module  # for forward and backward

    def weigh(self, valid: Callable[[], Tensor]) -> Weigh:
        """Return what makes the mean over these transitions [T, B] this rank's part of the mean over all ranks."""
        ...

    def backward(self, total: Tensor) -> None: ...

    def agree(self, loss: Loss, grad_norm: Tensor) -> tuple[Loss, Tensor]:
        """Return the same on all ranks, so that they take a step, or skip it, together."""
        ...

    def sync(self, updates: int | None = None) -> None:
        """Make the weights those of all ranks: after some updates if that is due, and without a number at once."""
        ...


class NoAverager:
    """One rank alone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def weigh(self, valid: Callable[[], Tensor]) -> Weigh:
        return lambda loss: loss

    def backward(self, total: Tensor) -> None:
        total.backward()

    def agree(self, loss: Loss, grad_norm: Tensor) -> tuple[Loss, Tensor]:
        return loss, grad_norm

    def sync(self, updates: int | None = None) -> None:
        pass


class Publisher(Protocol):
    """The destination of published weights: the policy, or the rank that serves it."""

    def publish(self, model: nn.Module, version: int) -> None: ...


class Learner:
    """Owned by the learner thread."""

    def __init__(
        self,
        config: LearnerConfig,
        model: nn.Module,
        algorithm: Algorithm,
        metrics: LearningMetrics,
        *,
        env_steps: Callable[[], int],
        prefer: Callable[[Ticket, Tensor], None],
        averager: Averager | None = None,
    ) -> None:
        """`env_steps` are those of all ranks; `prefer` takes the priorities of the unrolls trained on."""
        if config.compile:
            compile_forward(model)
        self.model = model
        self.skipped_in_a_row = 0  # updates, up to the newest
        self._config = config
        self._algorithm = algorithm
        self._metrics = metrics
        self._env_steps = env_steps
        self._prefer = prefer
        self._averager = averager or NoAverager(model)
        self._networks = networks_of(algorithm)
        self._trained = nn.ModuleList([model, self._networks])
        self._parameters = list(self._trained.parameters())
        self._optimizer = build_optimizer(config.algorithm, self._parameters)
        self._has_skipped = False  # a gradient step of this update
        self._late = LateReport(self._parameters[0].device, metrics) if self._can_skip_there() else None
        self._stepped_at: float | None = None  # since the weights were last published

    def train(self, unrolls: Unrolls) -> None:
        """Take the gradient steps that a train batch is worth; `publish` makes them count."""
        timer, metrics = Stopwatch(self._metrics.learner_seconds), self._metrics
        metrics.policy_lag.observe_all(metrics.updates - unrolls.policy_version[:-1])
        length, used = len(unrolls.terminated) - self._algorithm.overlap, 0
        for batch, loss in self._steps(unrolls, timer):
            used += self._algorithm.valid(batch).numel()
            if loss.priority is not None:
                self._prefer(batch.ticket, loss.priority)
        metrics.trained_steps += length * unrolls.columns
        metrics.unrolls_trained += unrolls.columns
        metrics.unroll_uses += used // length

    def assist(self, blank: Unrolls) -> None:
        """Take part in an update of the other ranks, with unrolls that count for nothing."""
        timer = Stopwatch(self._metrics.learner_seconds)
        for _ in self._steps(blank, timer):
            pass

    def _steps(self, unrolls: Unrolls, timer: Stopwatch) -> Iterator[tuple[Batch, Loss]]:
        """Take the gradient steps of an update, on all ranks alike; the first that has to be skipped is the last.

        The statistics of the train batch are included at the end, so that all steps see inputs alike.
        """
        self._has_skipped = False
        for batch in self._algorithm.batches(unrolls):
            yield batch, self._step(batch, timer)
            if self._has_skipped:
                break
        apply_statistics(self._trained)
        if self._late is not None:
            self._has_skipped = self._late.next_update()
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if self._has_skipped else 0
        self._metrics.updates += 1
        self._averager.sync(self._metrics.updates)
        timer.lap("optimize")

    def publish(self, policy: Publisher) -> None:
        """Serve the trained weights. The version is the number of updates."""
        timer = Stopwatch(self._metrics.learner_seconds)
        policy.publish(self.model, self._metrics.updates)
        now = timer.lap("publish")
        if self._stepped_at is not None:
            self._metrics.publish_lag_seconds.observe(now - self._stepped_at)
            self._stepped_at = None

    def _step(self, batch: Batch, timer: Stopwatch) -> Loss:
        algorithm, averager, metrics = self._algorithm, self._averager, self._metrics
        fraction = self._env_steps() / self._config.stop.env_steps
        self._set_learning_rate(fraction)
        weigh = averager.weigh(lambda: algorithm.valid(batch))
        loss = whole_loss(algorithm, batch, averager.model, fraction)
        if not metrics.gradient_steps:
            check_loss(loss, f"algorithm.name={self._config.algorithm.name}")
        loss = weigh(loss)
        timer.lap("forward")
        self._optimizer.zero_grad(set_to_none=True)
        averager.backward(loss.total)
        grad_norm = clip_gradients(self._parameters, self._config.algorithm.max_grad_norm)
        loss, grad_norm = averager.agree(loss, grad_norm)
        timer.lap("backward")
        self._step_if_finite(loss, grad_norm)

        metrics.gradient_steps += 1
        self._stepped_at = time.monotonic()
        if self._late is None and metrics.gradient_steps % REPORT_EVERY == 1:
            report(metrics, *numbers_of(loss, grad_norm))
        timer.lap("optimize")
        return loss

    def _set_learning_rate(self, fraction: float) -> None:
        config = self._config.algorithm
        self._metrics.learning_rate = linear(config.learning_rate, config.learning_rate_end, fraction)
        for group in self._optimizer.param_groups:
            group["lr"] = self._metrics.learning_rate

    def _step_if_finite(self, loss: Loss, grad_norm: Tensor) -> None:
        """Skip a step that would make the weights other than finite."""
        is_finite = torch.isfinite(loss.total + grad_norm)
        if self._late is not None:
            self._step_where_finite(loss, is_finite)
            self._late.note(loss, grad_norm, is_finite)
        elif is_finite:
            self._optimizer.step()
            self._algorithm.stepped(loss)
        else:
            discard_statistics(self._trained)
            self._metrics.skipped_updates += 1
            self._has_skipped = True

    def _can_skip_there(self) -> bool:
        """Tell whether the device can skip a step by itself, so that the host need not wait to know."""
        return is_accelerator(self._parameters[0].device) and self._config.algorithm.optimizer is Optimizer.adam

    def _step_where_finite(self, loss: Loss, is_finite: Tensor) -> None:
        """Let the device skip a step; what follows it changes nothing then."""
        self._optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]  # of torch's fused optimisers
        self._optimizer.step()
        for staged in staged_statistics(self._trained):
            staged.copy_(torch.where(is_finite, staged, 0.0))
        self._algorithm.stepped(loss)

    @property
    def has_diverged(self) -> bool:
        return self.skipped_in_a_row >= PATIENCE

    def tensors(self) -> Tensors:
        """Return what a checkpoint needs of it."""
        return {
            **with_prefix("model", dict(self.model.state_dict())),
            **with_prefix("networks", dict(self._networks.state_dict())),
            **with_prefix("optimizer", pack_optimizer(self._optimizer)),
            **with_prefix("algorithm", self._algorithm.tensors()),
        }

    def load(self, tensors: Tensors) -> None:
        """Restore everything but the model, which is loaded by itself, for it may come from another run."""
        self._networks.load_state_dict(without_prefix("networks", tensors))
        unpack_optimizer(self._optimizer, without_prefix("optimizer", tensors))
        self._algorithm.load(without_prefix("algorithm", tensors))

    def sync(self) -> None:
        """Make the weights those of all ranks, which they need not be after every update."""
        self._averager.sync()
