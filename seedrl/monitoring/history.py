"""The rows of a whole run in bounded memory, for plots. Knows nothing of their content but the steps."""

import contextlib
import json
import math
from array import array
from collections.abc import Collection
from pathlib import Path
from typing import Any

LIMIT = 600


class History:
    """Rows at even intervals, and the newest. Written by the main thread, read by any.

    When there are too many rows every second one is dropped, and from then on only every second new one is kept. It
    stores numbers only, eight bytes each.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._names: list[str] = []  # of the numbers of a row; later rows may have more
        self._kept: list[array[float]] = []  # never changed in place
        self._newest: array[float] | None = None
        self._stride = 1  # rows that come for each that is kept
        self._came = 0

    def add(self, row: dict[str, Any]) -> None:
        numbers = self._packed(row)
        if self._came % self._stride == 0:
            kept = [*self._kept, numbers]
            if len(kept) >= self._limit:
                kept, self._stride = kept[::2], 2 * self._stride
            self._kept = kept
        self._came += 1
        self._newest = numbers

    def rows(self, columns: Collection[str] = ()) -> list[dict[str, float]]:
        """Return the rows, oldest first, with finite numbers only; all columns, or those that are named."""
        kept, newest = self._kept, self._newest
        packed = kept if newest is None or kept[-1] is newest else [*kept, newest]
        if not columns:
            return [self._unpacked(numbers) for numbers in packed]
        places = [(name, self._names.index(name)) for name in columns if name in self._names]
        return [{name: row[at] for name, at in places if at < len(row) and math.isfinite(row[at])} for row in packed]

    def _packed(self, row: dict[str, Any]) -> "array[float]":
        self._names += [name for name in row if name not in self._names]
        found = (row.get(name) for name in self._names)
        return array("d", (value if isinstance(value, int | float) else math.nan for value in found))

    def _unpacked(self, numbers: "array[float]") -> dict[str, float]:
        pairs = zip(self._names, numbers, strict=False)  # names that came later have no number here
        return {name: value for name, value in pairs if math.isfinite(value)}

    def load(self, path: Path) -> None:
        """Load what earlier processes of the run have written, without what a crash has cut off or undone."""
        if path.exists():
            with path.open(errors="replace") as lines:
                for line in lines:
                    with contextlib.suppress(ValueError, RecursionError):
                        self._take(json.loads(line))

    def _take(self, row: Any) -> None:
        if not isinstance(row, dict) or not isinstance(steps := row.get("env_steps"), int):
            return
        if self._newest is not None and self._unpacked(self._newest)["env_steps"] >= steps:
            self._kept = [each for each in self._kept if self._unpacked(each)["env_steps"] < steps]
        self.add(row)
