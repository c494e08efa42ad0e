"""The progress of a run in the terminal. Knows nothing of how the numbers are measured."""

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from seedrl.config import Display, LearnerConfig
from seedrl.monitoring.sampler import Row
from seedrl.monitoring.units import duration
from seedrl.run.identity import ALONE, Identity

PLAIN_SECONDS = 5.0
TABLE_WIDTH = 46
TROUBLE = {"dropped_rows": "dropped rows", "skipped_updates": "skipped updates"}  # shown when there is any


class ProgressDisplay:
    """A live table on a terminal, one plain line every few seconds otherwise. `say` may be called by any thread."""

    def __init__(
        self,
        config: LearnerConfig,
        console: Console,
        identity: Identity = ALONE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._identity = identity
        self._console = console
        self._clock = clock
        self._next_line = clock() + PLAIN_SECONDS
        live = config.display is Display.live or (config.display is Display.auto and console.is_terminal)
        self._plain = config.display is Display.plain or (config.display is Display.auto and not live)
        self._live = Live(console=console, auto_refresh=False, transient=True) if live else None

    def show(self, row: Row) -> None:
        if self._live:
            self._live.start()  # no more than once
            self._live.update(self._table(row), refresh=True)
        elif self._plain and self._clock() >= self._next_line:
            self._next_line = self._clock() + PLAIN_SECONDS
            self._console.print(self._line(row), highlight=False, soft_wrap=True)

    def say(self, text: str, is_essential: bool = False) -> None:
        """Print a line, which names the rank if there are several. With display=none only essential lines are shown."""
        text = re.sub(r"^learner\b", str(self._identity), text)
        if is_essential or self._config.display is not Display.none:
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def close(self) -> None:
        if self._live:
            self._live.stop()

    def _line(self, row: Row) -> str:
        return "  ".join(f"{name} {value}" for name, value in self._readable(row))

    def _table(self, row: Row) -> Table:
        width = min(TABLE_WIDTH, self._console.width)
        table = Table(title=f"seedrl · {self._config.env.id}", title_style="bold", show_header=False, width=width)
        table.add_column(style="dim", overflow="fold")
        table.add_column(justify="right", overflow="fold")
        for name, value in self._readable(row):
            table.add_row(name, value)
        return table

    def _readable(self, row: Row) -> list[tuple[str, str]]:
        goal = self._config.stop.env_steps
        rate = row["steps_per_second"]
        score = row["return_mean_100"]
        target = self._config.stop.return_mean_100
        return [
            ("steps", f"{row['env_steps']:,} / {goal:,}"),
            ("steps/s", f"{rate:,.0f}"),
            ("return", ("–" if score is None else f"{score:.2f}") + ("" if target is None else f" → {target:g}")),
            *([] if score is not None or "reward_per_step" not in row else [_reward(row)]),
            *_evaluation(row),
            ("learning", row["learning"]),
            ("episodes", f"{row['episodes']:,}"),
            ("updates", f"{row['updates']:,}"),
            ("policy lag", f"{row['policy_lag']:.1f}"),
            ("batch fill", f"{row['inference_batch']:.0f} / {self._config.serving.max_rows} rows"),
            ("bottleneck", row["bottleneck"]),
            ("learner wait", f"{row['learner_wait_fraction']:.0%}"),
            ("actors", f"{row['actors']}, waiting {row['actor_wait_fraction']:.0%}"),
            *[(words, f"{row[name]:,}") for name, words in TROUBLE.items() if row[name]],
            ("ETA", duration((goal - row["env_steps"]) / rate) if rate > 0 else "–"),
        ]


def _reward(row: Row) -> tuple[str, str]:
    return "reward/step", f"{row['reward_per_step']:.3g}"


def _evaluation(row: Row) -> list[tuple[str, str]]:
    score = row["eval_return_mean_100"]
    return [] if score is None else [("evaluation", f"{score:.2f}")]


def console(log: Path | None = None) -> Console:
    """Return the console of the terminal, or of a log file."""
    if log is None:
        return Console(file=sys.stdout)
    log.parent.mkdir(exist_ok=True)
    return Console(file=log.open("a", buffering=1), width=200)
