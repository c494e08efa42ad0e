"""The rows of a whole run in bounded room, for plots. Knows nothing of what is in them but their steps."""

import contextlib
import json
from pathlib import Path
from typing import Any

LIMIT = 600


class History:
    """Written by the main thread, read by any. Evenly spaced: when there are too many rows every second one goes, and
    from then on only every second further one is kept. The newest is always there."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._kept: list[dict[str, Any]] = []  # never changed in place
        self._newest: dict[str, Any] | None = None
        self._stride = 1  # rows that come for each that is kept
        self._came = 0

    def add(self, row: dict[str, Any]) -> None:
        if self._came % self._stride == 0:
            kept = [*self._kept, row]
            if len(kept) >= self._limit:
                kept, self._stride = kept[::2], 2 * self._stride
            self._kept = kept
        self._came += 1
        self._newest = row

    def rows(self) -> list[dict[str, Any]]:
        """Oldest first; not to be changed."""
        kept, newest = self._kept, self._newest
        return kept if newest is None or kept[-1] is newest else [*kept, newest]

    def load(self, path: Path) -> None:
        """What earlier processes of the run have written, without what a crash has cut off or undone."""
        if path.exists():
            with path.open(errors="replace") as lines:
                for line in lines:
                    with contextlib.suppress(ValueError, RecursionError):
                        self._take(json.loads(line))

    def _take(self, row: Any) -> None:
        if not isinstance(row, dict) or not isinstance(steps := row.get("env_steps"), int):
            return
        if self._newest is not None and self._newest["env_steps"] >= steps:
            self._kept = [each for each in self._kept if each["env_steps"] < steps]
        self.add(row)
