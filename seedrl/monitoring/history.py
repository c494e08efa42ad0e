"""The rows of a whole run in bounded room, for plots. Knows nothing of what is in them."""

import contextlib
import json
from pathlib import Path
from typing import Any

LIMIT = 600


class History:
    """Written by the main thread, read by any. When it is full, every second row goes: the whole run remains."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        rows = [*self._rows, row]
        self._rows = rows if len(rows) <= self._limit else rows[::2] if len(rows) % 2 else rows[1::2]

    def rows(self) -> list[dict[str, Any]]:
        """Oldest first; not to be changed."""
        return self._rows

    def load(self, path: Path) -> None:
        """What earlier processes of the run have written; lines that a crash has cut off are left out."""
        if path.exists():
            for line in path.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    self.add(json.loads(line))
