"""The progress of a run in the terminal, and its closing lines. Knows nothing of how the numbers are measured."""

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

    def say(self, text: str) -> None:
        """Print a line, which names the rank if there are several."""
        text = re.sub(r"^learner\b", str(self._identity), text)
        if self._config.display is not Display.none:
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


def closing_words(summary: Row, run_dir: str) -> str:
    """Return the closing lines of a run."""
    score, episodes = summary["return_mean_100"], min(summary["episodes"], 100)
    counted = "1 episode" if episodes == 1 else f"the last {episodes} episodes"
    shown_score = "no episode finished" if score is None else f"{score:.2f} (mean return of {counted})"
    evaluated = summary["eval_return_mean_100"]
    of_evaluation = [] if evaluated is None else [f"  evaluation {evaluated:.2f} (the same, acting greedily)"]
    took = duration(summary["seconds"])
    lines = [
        f"{summary['reason']}.",
        f"  score      {shown_score}",
        *of_evaluation,
        *learning_words(summary["learning"]),
        f"  steps      {summary['env_steps']:,} in {took}, {summary['steps_per_second']:,.0f} steps/s",
        f"  updates    {summary['updates']:,}, policy lag {summary['policy_lag_mean']:.1f}, "
        f"learner waited {summary['learner_wait_fraction']:.0%}, {summary['inference_batch_mean']:.0f} rows per batch",
        *timing_tree(summary["seconds_by_stage"]),
        f"  saved in   {run_dir}",
        f"  resume     seedrl run run_dir={run_dir} … with the same settings and a larger stop.env_steps",
        "  try next   seedrl run env=pong · seedrl run env=catch · seedrl run --help",
    ]
    return "\n".join(lines)


def learning_words(learning: dict[str, str]) -> list[str]:
    """Return the verdict on learning, and what to try if there is anything."""
    change = [f"             → {learning['change']}"] if learning["change"] else []
    return [f"  learning   {learning['verdict']}: {learning['evidence']}", *change] if learning["evidence"] else []


def timing_tree(seconds_by_stage: dict[str, dict[str, float]]) -> list[str]:
    """Return how each thread spent its time; the stages are those of metrics and dashboards."""
    lines = []
    for thread, stages in seconds_by_stage.items():
        total = sum(stages.values()) or 1.0
        shares = [f"{stage} {seconds / total:.0%}" for stage, seconds in stages.items() if seconds / total >= 0.005]
        lines.append(f"  {thread:<10} {duration(total)}: {' · '.join(shares)}")
    return lines
