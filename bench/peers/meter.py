"""Measures every side alike: steps, wall and CPU seconds of its whole process tree, as one line of JSON.

Adapters import it from beside them, in the peer's own Python, so it needs nothing but Python and knows no peer.
"""

import argparse
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import NoReturn

TICKS = os.sysconf("SC_CLK_TCK")


def arguments() -> argparse.Namespace:
    """Return the arguments that every adapter takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", required=True, help="a preset of seedrl, or inference for what only serves")
    parser.add_argument("--seconds", type=float, required=True, help="to measure for, after the warm-up")
    parser.add_argument("--target", type=float, default=0.0, help="also go on until this mean return of 100 episodes")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds after which it counts as not reached")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


class Meter:
    """Is told the steps so far whenever a side can tell. Counts from the first call after the warm-up."""

    def __init__(self, asked: argparse.Namespace, warm_up: float) -> None:
        self._asked = asked
        self._warm_up = warm_up
        self._began = time.perf_counter()  # the moment training begins: imports and start-up are over
        self._from: tuple[float, float, float] | None = None
        self.result: dict[str, float] = {}

    def update(self, steps: float, mean_return: float | None = None) -> bool:
        """True once everything asked for is known. Chunks of work are counted whole: call this between them."""
        now, asked = time.perf_counter(), self._asked
        if asked.target and "seconds_to_target" not in self.result and (mean_return or 0.0) >= asked.target:
            self.result |= {"seconds_to_target": now - self._began, "steps_to_target": steps}
        if self._from is None:
            if now - self._began >= self._warm_up:
                self._from = (steps, now, tree_cpu(os.getpid()))
            return False
        steps_before, wall_before, cpu_before = self._from
        if now - wall_before >= asked.seconds and "steps" not in self.result:
            cpu = tree_cpu(os.getpid()) - cpu_before
            self.result |= {"steps": steps - steps_before, "wall": now - wall_before, "cpu": cpu}
        is_settled = not asked.target or "seconds_to_target" in self.result or now - self._began >= asked.patience
        return "steps" in self.result and is_settled

    def finish(self) -> NoReturn:
        finish(self.result)


def finish(result: dict[str, float]) -> NoReturn:
    """Says what was found, as the last line of output, and ends the whole process tree at once: tidy ends take long."""
    print("\n" + json.dumps(result), flush=True)
    end_descendants(os.getpid())
    os._exit(0)


def end_descendants(root: int) -> None:
    for pid in family(root)[:-1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def tree_cpu(root: int) -> float:
    """User and system seconds of a process and all its descendants, those that have ended included."""
    ticks = 0
    for pid in family(root):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile and is counted by its parent
        ticks += sum(int(field) for field in fields[11:15])
    return ticks / TICKS


def family(root: int) -> list[int]:
    """A process and its living descendants, children before parents."""
    found = []
    for path in Path(f"/proc/{root}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue
        for child in children:
            found += family(int(child))
    return [*found, root]
