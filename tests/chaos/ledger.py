"""Checks that counters only grow: within a learner process, from checkpoint to checkpoint, and over its restarts."""

import re
from typing import Any

from tests.chaos.cluster import Numbers

GROWING = re.compile(r"seedrl_\w+_(total|count|bucket)(\{|$)")
EXACT = ("env_steps", "rows", "episodes", "unrolls_made", "updates", "trained_steps", "unrolls_trained")


class Ledger:
    """`fallen` says which counter fell, when and how far."""

    def __init__(self) -> None:
        self.fallen: list[str] = []
        self.lost_steps = 0.0  # served since the last checkpoint of a learner that was killed
        self._process = 0
        self._seen: Numbers = {}
        self._saved: Numbers = {}

    def look(self, process: int, numbers: Numbers, checkpoint: dict[str, Any]) -> None:
        """Note what the `process`th learner shows now, empty while it does not answer, and the newest checkpoint."""
        saved = totals_in(checkpoint)
        self._compare("checkpoint", self._saved, saved)
        growing = {name: value for name, value in numbers.items() if GROWING.match(name)}
        if growing and process != self._process:
            self._compare("resumed", self._saved, growing)
            self.lost_steps += max(0.0, _steps(self._seen) - _steps(self._saved))
            self._process, self._seen = process, {}
        self._compare("running", self._seen, growing)
        self._saved = saved or self._saved
        self._seen = growing or self._seen

    def _compare(self, where: str, before: Numbers, now: Numbers) -> None:
        self.fallen += [
            f"{where}: {name} fell from {value:g} to {now[name]:g}"
            for name, value in before.items()
            if name in now and now[name] < value
        ]


def totals_in(checkpoint: dict[str, Any]) -> Numbers:
    """The plain counters of a checkpoint by the names under which they are exported."""
    totals = {**checkpoint.get("serving", {}), **checkpoint.get("learning", {})}
    return {f"seedrl_{name}_total": float(totals[name]) for name in EXACT if name in totals}


def _steps(numbers: Numbers) -> float:
    return numbers.get("seedrl_env_steps_total", 0.0)
