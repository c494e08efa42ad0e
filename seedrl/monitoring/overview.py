"""`seedrl status`: a learner, its streams and its actors in the terminal. Knows nothing of how they are measured."""

import contextlib
import json
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from seedrl.config import StatusConfig
from seedrl.errors import ConfigError, LearnerLost
from seedrl.monitoring.connection import ANSWER_SECONDS, RunEnded, learner_status
from seedrl.monitoring.members import Gone, endpoints_of, serving
from seedrl.monitoring.units import duration
from seedrl.run.closing import next_lines
from seedrl.run.context import ENDED, Context, ContextFile, dump
from seedrl.run.directory import RunDirectory
from seedrl.run.finding import find_run
from seedrl.run.identity import Identity
from seedrl.status import SILENT_SECONDS, ActorStatus, Status
from seedrl.wire.channel import ask_status

LEFT = ("", "actor", "transport", "peer")  # headings of text
DROPPED = ("peer", "transport", "waiting", "lag", "envs", "heard", "round trip")  # in a narrow terminal, first to last
BRANCH, GAP = 4, 2  # columns of the terminal for the branch of the tree and between two headings
NARROWEST = 24  # columns for which lines are broken


def run_status(config: StatusConfig) -> None:
    try:
        status = _status(config)
    except LearnerLost as error:
        if not config.learner:
            show_remains(find_run(config.run), config.json, Console())
        if isinstance(error, RunEnded):
            return
        raise
    if config.json:
        print(json.dumps(asdict(status), indent=2))
    else:
        show(status, config.top, Console())


def _status(config: StatusConfig) -> Status:
    """Return the status of the learner, the rank or the actor that is named. Raises ConfigError if there is none."""
    if config.rank is None and not config.actor:
        return learner_status(config)
    endpoints = endpoints_of(config)
    if not config.actor:
        return ask_status(endpoints[0].link, ANSWER_SECONDS)
    found = serving(config.actor, endpoints)
    if isinstance(found, Gone):
        raise ConfigError(f"actor={found.name} is gone: {found.words}")
    status = ask_status(found[0].link, ANSWER_SECONDS)
    return replace(status, actors=[actor for actor in status.actors if actor.name == config.actor])


def show_remains(directory: Path, as_json: bool, console: Console) -> None:
    """Show what is known of a run that is down: what it was, how it ended, its members, and what may come next."""
    context = ContextFile(directory).read()
    if as_json:
        print(dump(context), end="")
        return
    now = time.time()
    counted = ", ".join(f"{value:,} {name}" for name, value in context.counters.items())
    lines = [
        f"{directory}  {context.state.name}, {duration(now - context.written)} ago{': ' if context.reason else ''}"
        f"{context.reason}",
        *_outcome(directory),
        f"│  {counted or 'nothing counted yet'}; newest checkpoint {context.checkpoint or 'none'}",
        *(f"{'└─' if last else '├─'} {words}" for last, words in _remains(context, now)),
        *_next(directory, context),
    ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _outcome(directory: Path) -> Iterator[str]:
    """Yield a line about what a run was and has reached, if it has left a summary."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        summary = json.loads((directory / "summary.json").read_bytes())
        score = "–" if summary["return_mean_100"] is None else f"{summary['return_mean_100']:.2f}"
        yield (
            f"│  {summary['env']}, seed {summary['seed']}: return {score} after {duration(summary['seconds'])}, "
            f"{summary['steps_per_second']:,.0f} steps/s"
        )


def _next(directory: Path, context: Context) -> list[str]:
    """Return the commands that may follow the end of a run."""
    run = RunDirectory(directory)
    outcome = {"status": context.state.name.lower(), "env_steps": context.counters.get("env_steps", 0)}
    return next_lines(run, run.config(), outcome) if context.state in ENDED else []


def _remains(context: Context, now: float) -> Iterator[tuple[bool, str]]:
    """Yield (whether it is the last one, description) for every member."""
    members = list(context.members.values())
    for member in members:
        life = f"seen {duration(now - member.seen)} ago" if member.seen else "never seen"
        life += "" if member.is_leased(now) else ", lease over"
        ended = "" if member.exit_code is None else f", exit code {member.exit_code}"
        ended += f": {member.last_words}" if member.last_words else ""
        restarts = f", restarted {member.restarts}×" if member.restarts else ""
        others = [each.name for each in context.affected(member.name) if each is not member]
        concerns = f"; without it wait {', '.join(others)}" if others else ""
        words = f"{member}, life {member.incarnation}, {life}{restarts}{ended}{concerns}"
        yield member is members[-1], words


def show(status: Status, top: int, console: Console) -> None:
    for line in _learner_lines(status):
        for part in _wrapped(line, console.width):
            console.print(part, highlight=False, soft_wrap=True, markup=False)
    shown = status.actors[:top]
    if shown:
        console.print(_table(shown, console.width), markup=False)
    if len(status.actors) > top:
        console.print(f"   … and {len(status.actors) - top} more, all of them faster", highlight=False)


def _wrapped(line: str, width: int) -> list[str]:
    """Break a line between words where the terminal ends, and continue the frame; words are never cut."""
    return textwrap.wrap(
        line, max(width, NARROWEST), subsequent_indent="│    ", break_long_words=False, break_on_hyphens=False
    )


def _table(actors: Sequence[ActorStatus], width: int) -> Table:
    """Return a table of actors, with as many columns as there is room for; the least important ones go first."""
    rows = [_cells(actor) for actor in actors]
    columns = _columns(rows, width)
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    for heading in ("", *columns):
        table.add_column(heading, justify="left" if heading in LEFT else "right", overflow="fold")
    for actor, row in zip(actors, rows, strict=True):
        is_silent = actor.silent_seconds > SILENT_SECONDS
        branch = "└─" if actor is actors[-1] else "├─"
        table.add_row(branch, *(row[heading] for heading in columns), style="bold red" if is_silent else "")
    return table


def _columns(rows: Sequence[dict[str, str]], width: int) -> list[str]:
    kept = list(rows[0])
    widths = {heading: max(len(heading), *(len(row[heading]) for row in rows)) + GAP for heading in kept}
    for heading in DROPPED:
        if BRANCH + sum(widths[each] for each in kept) - GAP <= width:
            break
        kept.remove(heading)
    return kept


def _before_returns(row: dict[str, float]) -> str:
    reward = f"; reward {row['reward_per_step']:.3g} per step" if "reward_per_step" in row else ""
    return f"– (no episode has ended{reward})"


def league_words(row: dict[str, float]) -> str:
    """Return how the policy does against the bank, in words."""
    return (
        f"Elo {row['elo']:,.0f}, score {row['win_rate']:.0%} against {row['bank_entries']:.0f} policies of the bank, "
        f"{row['games']:,.0f} games"
    )


def _learner_lines(status: Status) -> list[str]:
    row = status.row
    who = Identity("learner", status.rank, status.ranks, node=status.node)
    lines = [
        f"{who}  {status.env} on {status.device}, {status.state}, seedrl {status.version}; {status.run_dir}",
        *([f"│  algorithm {status.algorithm}"] if status.algorithm else []),
    ]
    if row:
        score = f"{row['return_mean_100']:.2f}" if "return_mean_100" in row else _before_returns(row)
        if "eval_return_mean_100" in row:
            score += f", of evaluation {row['eval_return_mean_100']:.2f} ({row['eval_episodes']:,.0f} episodes)"
        lines += [
            f"│  {row['env_steps']:,.0f} of {status.goal_env_steps:,} steps in {duration(row['seconds'])}, "
            f"return {score}",
            f"│  {row['steps_per_second']:,.0f} steps/s, {row['updates_per_second']:.1f} updates/s, policy lag "
            f"{row['policy_lag']:.1f}, reuse {row['reuse']:.1f}, learner waits {row['learner_wait_fraction']:.0%}"
            + (f", it could use {_actors(row['desired_actors'])}" if "desired_actors" in row else ""),
        ]
    if "limit/learner" in row:
        lines.append(f"│  {replay_words(row)}")
    if "elo" in row:
        lines.append(f"│  {league_words(row)}")
    if "exploration/epsilon" in row:
        lines.append(f"│  {exploration_words(row)}")
    if status.metrics_address:
        lines.append(f"│  live page http://{status.metrics_address}/")
    if status.learning.evidence:
        lines.append(f"│  learning {status.learning.verdict}: {status.learning.evidence}")
        lines += [f"│  → {status.learning.change}"] if status.learning.change else []
    lines += [f"│  bottleneck {status.verdict.bottleneck}: {status.verdict.evidence}", f"│  → {status.verdict.change}"]
    lines += [f"│  ! {words}: {count:,}" for words, count in status.trouble.items()]
    return [*lines, "│" if status.actors else "└  no actors"]


def _actors(number: float) -> str:
    return f"{number:,.0f} {'actor' if number == 1 else 'actors'}"


def replay_words(row: dict[str, float]) -> str:
    """Describe a replay memory, and which side its limiter holds back."""
    words = f"replay: store {row['store_fill']:.0%} full, {row['replayed']:.1f} samples per insert"
    held = {"filling": "the learner waits until it is filled", "learner": "the learner waits", "actors": "actors wait"}
    waits = [f"{side} {share:.0%} of the time" for name, side in held.items() if (share := row[f"limit/{name}"])]
    return f"{words}; {', '.join(waits)}" if waits else words


def exploration_words(row: dict[str, float]) -> str:
    """Describe how the environments explore that are trained on."""
    most, least = row["exploration/epsilon"], row["exploration/epsilon_least"]
    ladder = f", ladder {most:.2g} … {least:.2g}" if least < most else ""
    return f"exploration: temperature {row['exploration/temperature']:.3g}, epsilon {most:.2g}{ladder}"


def _cells(actor: ActorStatus) -> dict[str, str]:
    """Return what is shown of an actor, by heading."""
    return {
        "actor": actor.name + (f" (reconnected {actor.reconnects}×)" if actor.reconnects else ""),
        "envs": f"{actor.envs}",
        "steps/s": f"{actor.steps_per_second:,.0f}",
        "round trip": f"{1e3 * actor.round_trip_seconds:.1f} ms",
        "waiting": f"{actor.wait_fraction:.0%}",
        "lag": f"{actor.policy_lag}",
        "transport": actor.transport,
        "heard": f"{actor.silent_seconds:.1f} s ago",
        "peer": actor.peer,
    }
