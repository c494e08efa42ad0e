"""`seedrl card`: describes a run on one page. Reads files only, and knows nothing of training.

The page begins with the YAML front matter that the Hugging Face hub reads from a model's README.
"""

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from seedrl.algorithms.settings import described
from seedrl.config import CardConfig, LearnerConfig, RunConfig
from seedrl.monitoring.curves import NOT_COMPARED, as_typed, flat, is_below
from seedrl.monitoring.plots import CURVE
from seedrl.run import checkpoint as files
from seedrl.run.checkpoint import Checkpoint
from seedrl.run.directory import RunDirectory, plain, write_atomically
from seedrl.run.snapshot import spec_of
from seedrl.specs import EnvSpec, leaves, names
from seedrl.trained.hub import upload_run

CARD = "card.md"
Json = dict[str, Any]


def run_card(config: CardConfig) -> None:
    path = write_card(Path(config.run))
    print(f"{path}: the card of {config.run}")
    if config.upload:
        print(f"uploaded to {upload_run(Path(config.run), path, config.upload, config.private)}")


def write_card(run_dir: Path) -> Path:
    run = RunDirectory(run_dir)
    config = run.config()
    path = run_dir / CARD
    write_atomically(path, "\n".join(card_of(run, config)) + "\n")
    return path


def card_of(run: RunDirectory, config: LearnerConfig) -> Iterator[str]:
    summary = _json(run.path / "summary.json")
    newest = next(reversed(files.found(run.checkpoints)), None)
    evaluations = {path.stem: _json(path) for path in sorted(run.path.glob("eval/*.json"))}
    yield from _front_matter(config, summary)
    yield f"# {config.env.id}, by seedrl"
    yield ""
    yield _opening(config, summary)
    yield from _pictures(run.path)
    yield from _section("Scores", _scores(summary, evaluations))
    yield from _section("Opponents", opponents_table(newest))
    yield from _section("Environment and policy", _policy(config, newest))
    yield from _section("How to run it", _usage(run))
    yield from _section("How it was made", _making(config, summary))
    yield from _section("Limits", _limits(config, summary, evaluations))


def _front_matter(config: LearnerConfig, summary: Json) -> Iterator[str]:
    score = summary.get("return_mean_100")
    content: Json = {
        "library_name": "seedrl",
        "tags": ["reinforcement-learning", "deep-reinforcement-learning", "seedrl", config.env.id],
    }
    if score is not None:
        task = {"type": "reinforcement-learning", "name": "reinforcement-learning"}
        data = {"name": config.env.id, "type": config.env.id}
        metrics = [{"type": "mean_reward", "name": _measured(summary), "value": score}]
        results = [{"task": task, "dataset": data, "metrics": metrics}]
        content["model-index"] = [{"name": f"seedrl-{config.env.id}", "results": results}]
    yield "---"
    yield yaml.safe_dump(content, sort_keys=False).rstrip()
    yield "---"
    yield ""


def _opening(config: LearnerConfig, summary: Json) -> str:
    words = f"A policy for `{config.env.id}`, trained by seedrl"
    if not summary:
        return f"{words}. The run has not ended cleanly yet, so it has no summary."
    return (
        f"{words}: {summary['env_steps']:,} environment steps in {summary['seconds'] / 60:,.1f} minutes "
        f"({summary['steps_per_second']:,.0f} a second), {summary['updates']:,} updates, "
        f"{summary['episodes']:,} episodes."
    )


def _pictures(run_dir: Path) -> Iterator[str]:
    if (run_dir / CURVE).exists():
        yield from ("", f"![The mean return of the last episodes, up to 100, over steps and time]({CURVE})")
    if videos := sorted(run_dir.glob("videos/*.mp4")):
        newest = videos[-1].relative_to(run_dir)
        if videos[-1].with_suffix(".gif").exists():
            yield from ("", f"![Recorded episodes]({newest.with_suffix('.gif')})")
        yield from ("", f"[Video]({newest})")


def _measured(summary: Json) -> str:
    """Return what `return_mean_100` is the mean of: a run may end before it has had 100 episodes."""
    return f"mean return of the last {min(summary['episodes'], 100)} training episodes"


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    content = list(lines)
    if content:
        yield from ("", f"## {title}", "", *content)


def _scores(summary: Json, evaluations: dict[str, Json]) -> Iterator[str]:
    rows = []
    if summary.get("return_mean_100") is not None:
        rows.append((_measured(summary), f"{summary['return_mean_100']:,.4g}"))
    rows += [row for found in evaluations.values() for row in _evaluation(found)]
    if rows:
        yield from _table(("what", "value"), rows)


def _evaluation(report: Json) -> Iterator[tuple[str, str]]:
    """Yield a row for a report of `seedrl eval`; nothing for a file that is none."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        score, seeds = report["score"], len(report["seeds"])
        manner = "acting greedily" if report["greedy"] else "sampling"
        over = f"{score['episodes']:,} episodes" + (f" of {seeds} seeds" if seeds > 1 else "")
        if "opponent" in report:
            over += f" against {report['opponent']}, {report['games']['won']:.1%} of them won"
        yield (
            f"evaluation after {report['env_steps']:,} steps, {manner}, {over}",
            f"{score['mean']:,.4g} ± {score['std']:,.3g} (median {score['median']:,.4g}, "
            f"IQM {score['iqm']:,.4g} [{score['iqm_low']:,.4g}, {score['iqm_high']:,.4g}])",
        )


def opponents_table(newest: Path | None) -> Iterator[str]:
    """Yield the pay-off table against the policies of the bank, if there were games."""
    league = _json(newest / files.STATE).get("league", {}) if newest is not None else {}
    payoffs = [each for each in league.get("payoffs", {}).values() if each["won"] + each["drawn"] + each["lost"]]
    if payoffs:
        yield f"The policy has an Elo rating of {league['elo']:,.0f}; the first snapshot has 1,000."
        yield ""
        rows = [
            (
                f"`{each['name']}`",
                f"won {each['won']:,}, drawn {each['drawn']:,}, lost {each['lost']:,}, recent score {each['rate']:.0%} "
                f"against an Elo rating of {each['elo']:,.0f}",
            )
            for each in payoffs
        ]
        yield from _table(("opponent", "games"), rows)


def _policy(config: LearnerConfig, newest: Path | None) -> Iterator[str]:
    model = config.model
    memory = f"LSTM of {model.lstm}" if model.lstm else f"GRU of {model.gru}" if model.gru else "none"
    rows = [
        (
            "environment",
            f"`{config.env.id}`" + (f" with `{as_typed(config.env.options)}`" if config.env.options else ""),
        ),
        ("frames", f"{config.env.frame_stack} stacked, {config.env.frame_skip} simulator frames per step"),
        ("network", f"`{model.name}`"),
        ("memory", memory),
    ]
    algorithm = config.algorithm
    if newest is not None:
        state = _json(newest / files.STATE)
        algorithm = replace(algorithm, **state.get("algorithm", {}))
        rows += list(_spaces(spec_of(Checkpoint({}, state)))) if "spec" in state else []
        rows += [("parameters", f"{state['parameters']:,}")] if "parameters" in state else []
        rows.append(("checkpoint", f"`{newest.relative_to(newest.parents[1])}`"))
    rows.insert(2, ("algorithm", described(algorithm)))
    yield from _table(("what", "value"), rows)


def _spaces(spec: EnvSpec) -> Iterator[tuple[str, str]]:
    for kind, tree in (("observation", spec.observation), ("action", spec.action)):
        for name, leaf in zip(names(tree), leaves(tree), strict=True):
            yield f"{kind} {f'`{name}`' if name else ''}".rstrip(), str(leaf)


def _usage(run: RunDirectory) -> Iterator[str]:
    where = shlex.quote(str(run.path))
    yield "```sh"
    yield f"seedrl record {where}"
    yield f"seedrl export {where} format=onnx"
    yield "```"
    yield ""
    yield "To train it again from scratch:"
    yield ""
    yield "```sh"
    yield training_command(run)
    yield "```"


def training_command(run: RunDirectory) -> str:
    """Return the command of an equal run: every setting of the run that differs from its default."""
    schema: type[LearnerConfig] = RunConfig if run.has_job else LearnerConfig
    usual, own = flat(plain(schema())), flat(plain(run.settings_to_resume(schema)))
    settings = [
        shlex.quote(f"{key}={as_typed(value)}")
        for key, value in own.items()
        if usual.get(key) != value and (key == "seed" or not is_below(key, NOT_COMPARED))
    ]
    return " ".join([f"seedrl {'run' if run.has_job else 'learner'}", "env=any", *settings])


def _making(config: LearnerConfig, summary: Json) -> Iterator[str]:
    rows = [(name, str(value)) for name, value in summary.get("made_with", {}).items() if value]
    rows += [("seed", str(config.seed)), ("status", str(summary.get("status", "not ended cleanly")))]
    rows += [(f"trouble: {words}", f"{count:,}") for words, count in summary.get("trouble", {}).items()]
    yield from _table(("what", "value"), rows)
    yield ""
    yield "<details><summary>All settings</summary>"
    yield ""
    yield "```yaml"
    yield yaml.safe_dump(plain(config), sort_keys=False).rstrip()
    yield "```"
    yield ""
    yield "</details>"


def _limits(config: LearnerConfig, summary: Json, evaluations: dict[str, Json]) -> Iterator[str]:
    yield f"- It was trained on `{config.env.id}` with these settings only."
    yield f"- This is one run with one seed ({config.seed}); other seeds may do better or worse."
    if not evaluations:
        yield "- The score is from training, where actions are sampled from the policy."
    if not summary:
        yield "- The run has not ended cleanly: this describes its newest checkpoint."


def _table(header: tuple[str, str], rows: list[tuple[str, str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|---|---|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '∣') for cell in row)} |"


def _json(path: Path) -> Json:
    """Return the contents of a file; nothing if it cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            print(f"{path} is left out: {error}", file=sys.stderr)
        return {}
    return content if isinstance(content, dict) else {}
