"""What the learner counts. Plain numbers, each written by one thread and read by any; nothing here costs a lock.

Knows nothing of how they are shown.
"""

from collections import Counter, deque
from dataclasses import dataclass, field


@dataclass
class ServingMetrics:
    """Written by the server thread."""

    env_steps: int = 0  # transitions of environments: rows that are not resets
    episodes: int = 0
    batches: int = 0
    rows: int = 0
    inference_seconds: float = 0.0  # busy with batches
    backpressure_seconds: float = 0.0  # waiting for the learner to free entries of the store
    dropped_rows: Counter[str] = field(default_factory=Counter)  # by reason
    refused: Counter[str] = field(default_factory=Counter)  # sessions, by reason
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=100))  # of the last finished episodes
    lengths: deque[int] = field(default_factory=lambda: deque(maxlen=100))

    @property
    def return_mean_100(self) -> float | None:
        returns = self.returns.copy()
        return sum(returns) / len(returns) if returns else None

    @property
    def batch_mean(self) -> float:
        return self.rows / self.batches if self.batches else 0.0


@dataclass
class LearningMetrics:
    """Written by the learner thread."""

    updates: int = 0
    trained_steps: int = 0  # rows of train batches, but for the last of each unroll
    skipped_updates: int = 0  # gradients that were not finite
    failed_checkpoints: int = 0
    wait_seconds: float = 0.0  # waiting for unrolls
    busy_seconds: float = 0.0
    policy_lag_sum: float = 0.0  # over updates, of the mean policy lag of the train batch
    losses: dict[str, float] = field(default_factory=dict)  # of the latest reported update

    @property
    def wait_fraction(self) -> float:
        total = self.wait_seconds + self.busy_seconds
        return self.wait_seconds / total if total else 0.0

    @property
    def policy_lag_mean(self) -> float:
        return self.policy_lag_sum / self.updates if self.updates else 0.0
