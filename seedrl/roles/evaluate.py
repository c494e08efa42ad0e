"""`seedrl eval` measures the policy of a run over whole episodes. Knows nothing of how actions are chosen.

The first episodes to finish would be the short ones. So every environment has its number of episodes beforehand, and
those count that it begins first, however long the others take.
"""

import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from seedrl.config import EvalConfig
from seedrl.errors import SeedrlError, require
from seedrl.launching.actors import start_actor
from seedrl.launching.children import LastWords, Process
from seedrl.monitoring.statistics import bootstrap, iqm
from seedrl.monitoring.units import duration
from seedrl.roles.policy_server import PolicyServer, settings_of
from seedrl.run.checkpoint import Checkpoint
from seedrl.run.directory import write_atomically
from seedrl.run.snapshot import chosen_checkpoint
from seedrl.serving.slots import FinishedEpisodes
from seedrl.sizes import learner_envs
from seedrl.validation import check_eval
from seedrl.wire.messages import Command

POLL_SECONDS = 0.1
GOODBYE_SECONDS = 10.0
LINE_SECONDS = 5.0  # between two lines of progress that is not a terminal's
MOST_DRAWS = 20_000_000  # episodes drawn for an interval, of all resamples together


class Quota:
    """A fixed number of first episodes of every slot that counts. Filled by the server thread, read by any thread."""

    def __init__(self, episodes: int, slots: int, counted: Callable[[int], bool] = lambda slot: True) -> None:
        own = [slot for slot in range(slots) if counted(slot)]
        number = {slot: at for at, slot in enumerate(own)}
        least, more = divmod(episodes, len(own))
        self.wanted = [least + (number[slot] < more) if slot in number else 0 for slot in range(slots)]
        self._returns: list[list[float]] = [[] for _ in range(slots)]
        self._lengths: list[list[int]] = [[] for _ in range(slots)]
        self._missing = episodes
        self.is_full = threading.Event()

    def add(self, episodes: FinishedEpisodes) -> None:
        columns = (column.tolist() for column in episodes)
        for slot, episode_return, length in zip(*columns, strict=True):
            if len(self._returns[slot]) < self.wanted[slot]:
                self._returns[slot].append(episode_return)
                self._lengths[slot].append(length)
                self._missing -= 1
        if not self._missing:
            self.is_full.set()

    @property
    def count(self) -> int:
        return sum(self.wanted) - self._missing

    @property
    def returns(self) -> list[float]:
        """Return the returns slot by slot, so that they do not depend on which was faster."""
        return [value for slot in self._returns for value in slot]

    @property
    def lengths(self) -> list[int]:
        return [value for slot in self._lengths for value in slot]


@dataclass(frozen=True, slots=True)
class Score:
    """A summary of some returns; the interval is that of the interquartile mean."""

    episodes: int
    mean: float
    median: float
    iqm: float
    iqm_low: float
    iqm_high: float
    std: float
    least: float
    most: float

    @classmethod
    def of(cls, returns: list[float]) -> "Score":
        values = np.array(returns, np.float64)
        low, high = bootstrap(values, resamples=max(100, min(10_000, MOST_DRAWS // len(values))))
        return cls(
            episodes=len(values),
            mean=float(values.mean()),
            median=float(np.median(values)),
            iqm=float(iqm(values)),
            iqm_low=low,
            iqm_high=high,
            std=float(values.std()),
            least=float(values.min()),
            most=float(values.max()),
        )

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.2f} ± {self.std:.2f}, median {self.median:.2f}, IQM {self.iqm:.2f} "
            f"[{self.iqm_low:.2f}, {self.iqm_high:.2f}], {self.least:g} … {self.most:g}, {self.episodes} episodes"
        )


@dataclass(slots=True)
class Round:
    """The episodes of one seed."""

    seed: int
    returns: list[float]
    lengths: list[int]
    seconds: float
    lost_sessions: int  # actors that had to join again: what they had begun is lost
    score: Score = field(init=False)

    def __post_init__(self) -> None:
        self.score = Score.of(self.returns)


def run_eval(config: EvalConfig) -> None:
    check_eval(config)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that actors are ended cleanly
    say = _to_stderr
    checkpoint = chosen_checkpoint(Path(config.run), config.checkpoint, warn=say)
    rounds = []
    for number in range(config.seeds):
        rounds.append(evaluate(config, checkpoint, config.seed + number, Progress(config, number)))
        say(f"seed {rounds[-1].seed}: {rounds[-1].score}")
        if lost := rounds[-1].lost_sessions:
            say(f"seed {rounds[-1].seed}: {lost} actors joined again; episodes they had begun are lost")
    report = report_of(config, checkpoint, rounds)
    path = write_report(config, report)
    if config.json:
        print(json.dumps(report, indent=2))
    else:
        print(_words(report, path))


def evaluate(
    config: EvalConfig, checkpoint: Checkpoint, seed: int, show: Callable[[Quota], None] = lambda quota: None
) -> Round:
    """Evaluate exactly `episodes` episodes with environments of this seed, streamed by real actors."""
    began = time.monotonic()
    settings = settings_of(config.run, envs_of(config))
    settings.env.options = {**settings.env.options, **config.options}
    settings.serving.max_slots = config.actors * settings.actors.envs
    settings.actors.count = config.actors
    settings.device, settings.threads = config.device, config.threads
    own, envs = learner_envs(settings), settings.actors.envs
    quota = Quota(config.episodes, settings.serving.max_slots, lambda slot: not config.opponent or slot % envs in own)
    with tempfile.TemporaryDirectory(prefix="seedrl-") as private:
        settings.listen = f"unix:{private}/eval.sock"
        deployment = PolicyServer(
            settings,
            checkpoint,
            greedy=config.greedy,
            seed=seed,
            say=lambda _: None,
            on_evaluated=quota.add,
            opponent=config.opponent,
        )
        actors: list[Process] = []
        try:
            deployment.start()
            logs = [Path(private) / f"actor-{number}.log" for number in range(config.actors)]
            actors += [start_actor(settings, settings.listen, f"eval-{at}", log) for at, log in enumerate(logs)]
            _wait(quota, deployment, list(zip(actors, logs, strict=True)), show)
        finally:
            _end(deployment, actors)
        joined = deployment.metrics.sessions_joined
    return Round(seed, quota.returns, quota.lengths, time.monotonic() - began, joined - config.actors)


def envs_of(config: EvalConfig) -> int:
    """Return the environments per actor, at most the number of its episodes, and whole simulations."""
    settings = settings_of(config.run)
    wanted, players = config.envs or settings.actors.envs, settings.env.players
    require(players > 1 or not config.opponent, f"opponent={config.opponent} needs several players, and there is one")
    counted = players if config.opponent else 1  # environments for one that counts
    return max(1, min(wanted, counted * config.episodes // config.actors) // players) * players


def _wait(
    quota: Quota, deployment: PolicyServer, actors: list[tuple[Process, Path]], show: Callable[[Quota], None]
) -> None:
    """Wait until there are enough episodes; raise if there never will be."""
    while not quota.is_full.wait(POLL_SECONDS):
        show(quota)
        if deployment.stop.is_set():
            return
        for process, log in actors:
            if process.poll() is not None:
                last = LastWords.of(log.read_text(errors="replace"))
                raise last.failure(SeedrlError, f"an actor ended with code {process.returncode}: {last.words}")


def _end(deployment: PolicyServer, actors: list[Process]) -> None:
    try:
        deployment.close(Command.END, "The evaluation is over")
    finally:
        deadline = time.monotonic() + GOODBYE_SECONDS
        while any(actor.poll() is None for actor in actors) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        for actor in actors:
            if actor.poll() is None:
                actor.kill()
            actor.wait()


# The report.


def report_of(config: EvalConfig, checkpoint: Checkpoint, rounds: list[Round]) -> dict[str, Any]:
    settings = settings_of(config.run)
    return {
        "run": config.run,
        "env": settings.env.id,
        "options": {**settings.env.options, **config.options},
        "checkpoint": config.checkpoint,
        "env_steps": checkpoint.state["serving"]["env_steps"],
        "updates": checkpoint.state["learning"]["updates"],
        "greedy": config.greedy,
        "episodes": config.episodes,
        **({"opponent": config.opponent, "games": games_of(rounds)} if config.opponent else {}),
        "score": asdict(Score.of([value for each in rounds for value in each.returns])),
        "seeds": [asdict(each) for each in rounds],
    }


def games_of(rounds: list[Round]) -> dict[str, float]:
    """Return the shares of games that were won, drawn and lost: those with a positive, no and a negative return."""
    returns = np.array([value for each in rounds for value in each.returns])
    results = {"won": returns > 0, "drawn": returns == 0, "lost": returns < 0}
    return {name: float(found.mean()) for name, found in results.items()}


def write_report(config: EvalConfig, report: dict[str, Any]) -> Path:
    """Write the report, into eval/ of the run directory if no other file is named."""
    path = Path(config.out)
    if not config.out:
        name = f"{report['env_steps']:012d}-{time.strftime('%Y%m%d-%H%M%S')}.json"
        path = Path(config.run) / "eval" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(report, indent=2) + "\n")
    return path


def _words(report: dict[str, Any], path: Path) -> str:
    manner = "greedily" if report["greedy"] else "sampling"
    lines = [f"{report['env']} after {report['env_steps']:,} steps, acting {manner}"]
    for each in report["seeds"]:
        length = float(np.mean(each["lengths"]))
        lines.append(f"  seed {each['seed']:<6} {Score(**each['score'])}, {length:.0f} steps each")
    if "opponent" in report:
        shares = ", ".join(f"{name} {share:.1%}" for name, share in report["games"].items())
        lines.append(f"  against     {report['opponent']}: {shares}")
    if len(report["seeds"]) > 1:
        lines.append(f"  all         {Score(**report['score'])}")
    return "\n".join([*lines, f"  saved in    {path}"])


def _to_stderr(words: str) -> None:
    print(f"seedrl eval: {words}", file=sys.stderr, flush=True)


class Progress:
    """Shows the progress of an evaluation: one line on a terminal, a new one every few seconds otherwise."""

    def __init__(self, config: EvalConfig, number: int) -> None:
        self._config = config
        self._number = number
        self._began = self._shown = time.monotonic()

    def __call__(self, quota: Quota) -> None:
        is_terminal, now = sys.stderr.isatty(), time.monotonic()
        if not is_terminal and now - self._shown < LINE_SECONDS:
            return
        self._shown = now
        returns = quota.returns
        mean = f", mean so far {np.mean(returns):.2f}" if returns else ""
        words = (
            f"seed {self._number + 1} of {self._config.seeds}: {quota.count} of {self._config.episodes} episodes"
            f"{mean}, {duration(now - self._began)}"
        )
        print(
            f"\r\033[K{words}" if is_terminal else words, end="" if is_terminal else "\n", file=sys.stderr, flush=True
        )
