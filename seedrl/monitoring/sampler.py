"""Rates, shares and means over the last seconds, from counters read at two times. Knows nothing of who reads them.

A *cycle* is what a group of environments goes through again and again: it steps (env), its request travels (network),
waits because the learner is behind (hold) or for more rows (fill), and waits for and goes through a batch (inference).
"""

import time
from collections.abc import Callable
from typing import Any

from seedrl.config import LearnerConfig
from seedrl.metrics import (
    BATCH_STAGES,
    LEARNER_STAGES,
    SERVING_STAGES,
    Group,
    LearningMetrics,
    ServingMetrics,
    totals_of,
)
from seedrl.run.stopping import Progress
from seedrl.serving.seats import ON_POLICY
from seedrl.serving.sessions import SessionTable
from seedrl.sizes import group_size

CYCLE = ("env", "network", "hold", "fill", "inference")

Row = dict[str, Any]  # a line of metrics.jsonl
Totals = dict[str, float]


class Sampler:
    """Reads the counters and makes rows of them. Owned by the main thread."""

    def __init__(
        self,
        config: LearnerConfig,
        serving: ServingMetrics,
        learning: LearningMetrics,
        sessions: SessionTable,
        seconds_before: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        progress: Callable[[], Progress | None] = lambda: None,
    ) -> None:
        """`progress` is that of all ranks, if this one shows it; then steps, episodes and returns come from there."""
        self._config = config
        self._progress = progress
        self._serving = serving
        self._learning = learning
        self._sessions = sessions
        self._clock = clock
        self._began = clock() - seconds_before

    def totals(self) -> Totals:
        """Return the present value of every counter; labels and parts of histograms are named name/part."""
        totals = {
            "time": self._clock() - self._began,
            "reward_sum": self._serving.reward_sum,
            "own_steps": self._serving.env_steps,
            **_flat(self._serving),
            **_flat(self._learning),
        }
        progress = self._progress()
        if progress is not None:
            totals |= {"env_steps": progress.env_steps, "episodes": progress.episodes}
        return totals

    def row(self, before: Totals, now: Totals) -> Row:
        """Return the progress of the run, and what has happened between two totals."""
        serving, learning, progress = self._serving, self._learning, self._progress()
        change = {name: value - before.get(name, 0.0) for name, value in now.items()}
        seconds, requests = change["time"], change["act_latency_seconds/count"]
        recent = self._sessions.recent
        latency = _ratio(change["act_latency_seconds/sum"], requests)
        round_trip = _ratio(recent.round_trip_seconds, recent.requests)
        cycle = self._cycle(change, latency, round_trip)
        return {
            "seconds": round(now["time"], 3),
            "env_steps": int(now["env_steps"]),
            "frames": int(now["env_steps"]) * self._config.env.frame_skip,
            "updates": learning.updates,
            "episodes": int(now["episodes"]),
            "return_mean_100": serving.return_mean_100 if progress is None else progress.return_mean,
            **{f"return_p{100 * float(share):.0f}": value for share, value in serving.return_quantiles().items()},
            "returns": serving.episode_return.count,
            "return_sum": serving.episode_return.sum,
            **({"reward_per_step": _ratio(change["reward_sum"], change["own_steps"])} if change["own_steps"] else {}),
            "eval_steps": serving.eval_steps,
            "eval_episodes": serving.eval_episodes,
            "eval_return_mean_100": serving.eval_return_mean_100,
            "steps_per_second": _ratio(change["env_steps"], seconds),
            "updates_per_second": _ratio(change["updates"], seconds),
            "policy_lag": _ratio(change["policy_lag/sum"], change["policy_lag/count"]),
            "reuse": _ratio(change["unroll_uses"], change["unrolls_made"]),
            "replayed": _ratio(change["unrolls_trained"], change["unrolls_made"]),
            "inference_batch": _ratio(change["rows"], change["batches"]),
            "act_latency_seconds": latency,
            "round_trip_seconds": round_trip,
            "learner_wait_fraction": _share(change, "learner_seconds", LEARNER_STAGES)["wait"],
            "backpressure_fraction": _ratio(change["serving_seconds/hold"], seconds),
            "actors": len(self._sessions.open),
            "paused_actors": sum(session.is_paused for session in list(self._sessions.open.values())),
            "actor_wait_fraction": _ratio(recent.wait_seconds, recent.wait_seconds + recent.env_seconds),
            "dropped_rows": sum(serving.rows_dropped.values()),
            "skipped_updates": learning.skipped_updates,
            **{f"cycle/{part}": value for part, value in cycle.items()},
            **{f"serving/{k}": v for k, v in _share(change, "serving_seconds", SERVING_STAGES).items()},
            **{f"learner/{k}": v for k, v in _share(change, "learner_seconds", LEARNER_STAGES).items()},
            **self._reported(),
            **self._exploration(),
            **self._league(),
        }

    def _reported(self) -> dict[str, float]:
        """Return what is known about a recent gradient step; nothing before the first one of this process."""
        learning = self._learning
        if not learning.algorithm:
            return {}
        return {
            "grad_norm": learning.grad_norm,
            "learning_rate": learning.learning_rate,
            **{f"algorithm/{name}": value for name, value in learning.algorithm.items()},
        }

    def _exploration(self) -> dict[str, float]:
        """Return how environments explore, unless all of them draw from the policy as it is."""
        least, most = self._sessions.exploration
        if (least, most) == (ON_POLICY, ON_POLICY):
            return {}
        return {
            "exploration/temperature": most.temperature,
            "exploration/epsilon": most.epsilon,
            "exploration/epsilon_least": least.epsilon,
        }

    def _league(self) -> dict[str, float]:
        """Return how the policy in training does against others; nothing before the first game has ended."""
        serving = self._serving
        if not sum(serving.games.values()):
            return {}
        return {
            "opponent_steps": serving.opponent_steps,
            "games": sum(serving.games.values()),
            "elo": round(serving.elo, 1),
            "win_rate": round(serving.win_rate, 4),
            "bank_entries": serving.bank_entries,
        }

    def _cycle(self, change: Totals, latency: float, round_trip: float) -> dict[str, float]:
        """Return the shares of a group's cycle. Its length follows from Little's law: groups = rate × cycle."""
        requests = change["act_latency_seconds/count"]
        if not requests:  # there was no answer: either all requests are held back, or there are none
            is_held = change["serving_seconds/hold"] > 0.5 * change["time"]
            return {**dict.fromkeys(CYCLE, 0.0), "hold" if is_held else "env": 1.0}
        hold, fill = (change[f"queue_seconds/{cause}"] / requests for cause in ("hold", "fill"))
        seconds = self.groups * change["time"] / requests
        travel = max(0.0, round_trip - latency)
        # A request that comes while a batch runs is read only afterwards: it has arrived and waits for inference.
        unread = travel * min(1.0, sum(change[f"serving_seconds/{each}"] for each in BATCH_STAGES) / change["time"])
        parts = {
            "env": max(0.0, seconds - max(round_trip, latency)),
            "network": travel - unread,
            "hold": hold,
            "fill": fill,
            "inference": max(0.0, latency - hold - fill) + unread,
        }
        return {name: _ratio(part, sum(parts.values())) for name, part in parts.items()}

    @property
    def groups(self) -> int:
        """Return the number of requests that can be under way at once."""
        return len(self._sessions.open) * (self._config.actors.envs // group_size(self._config))


def _flat(group: Group) -> Totals:
    flat: Totals = {}
    for name, value in totals_of(group).items():
        if not isinstance(value, dict):
            flat[name] = value
        elif "counts" in value:
            flat |= {f"{name}/count": sum(value["counts"]), f"{name}/sum": value["sum"]}
        else:
            flat |= {f"{name}/{label}": number for label, number in value.items()}
    return flat


def _share(change: Totals, name: str, stages: tuple[str, ...]) -> dict[str, float]:
    total = sum(change[f"{name}/{stage}"] for stage in stages)
    return {stage: _ratio(change[f"{name}/{stage}"], total) for stage in stages}


def _ratio(amount: float, per: float) -> float:
    return round(amount / per, 6) if per > 0 else 0.0
