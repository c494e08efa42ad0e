"""The numbers that people see of an update, copied to the host. Knows nothing of what they mean.

On an accelerator they are read an update late, when they have been there for long: reading them at once would make the
host wait for the whole update, and the device for the host. So is whether a step was skipped.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from seedrl.algorithms.base import Loss
from seedrl.device import Download
from seedrl.metrics import LearningMetrics


def numbers_of(loss: Loss, grad_norm: Tensor) -> tuple[list[str], list[float]]:
    """Return the names and values of what is reported, for which the host waits."""
    return _names(loss), _stacked(loss, grad_norm).tolist()


def report(metrics: LearningMetrics, names: Sequence[str], values: Sequence[float]) -> None:
    """Show the numbers of a gradient step."""
    shown = dict(zip(names, values, strict=True))
    metrics.grad_norm = shown.pop("grad_norm")
    metrics.algorithm.update(shown)


class LateReport:
    """The report of the last gradient step of an update, and how many were skipped. Owned by the learner thread."""

    def __init__(self, device: torch.device, metrics: LearningMetrics) -> None:
        self._metrics = metrics
        self._download = Download(device)
        self._names: list[str] = []  # of the copy that is under way
        self._newest: tuple[list[str], Tensor] = ([], torch.zeros(0))
        self._skipped = torch.zeros((), device=device)  # steps of this update

    def note(self, loss: Loss, grad_norm: Tensor, is_finite: Tensor) -> None:
        """Note a gradient step."""
        self._newest = _names(loss), _stacked(loss, grad_norm)
        self._skipped = self._skipped + ~is_finite

    def next_update(self) -> bool:
        """Begin to copy the numbers of this update; show those of the one before, and return whether it skipped."""
        skipped = self._show() if self._names else 0
        self._names, numbers = self._newest
        self._download.begin(torch.cat([numbers, self._skipped.to(numbers.dtype).unsqueeze(0)]))
        self._skipped = torch.zeros_like(self._skipped)
        return skipped > 0

    def _show(self) -> int:
        *values, skipped = self._download.wait().tolist()
        if not skipped:
            report(self._metrics, self._names, values)
        self._metrics.skipped_updates += int(skipped)
        return int(skipped)


def _names(loss: Loss) -> list[str]:
    return ["loss", *loss.report, "grad_norm"]


def _stacked(loss: Loss, grad_norm: Tensor) -> Tensor:
    return torch.stack([loss.total.detach(), *loss.report.values(), grad_norm])
