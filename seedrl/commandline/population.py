"""Population based training (Jaderberg et al. 2017, arXiv:1711.09846) as the search of a sweep. Starts no run.

Members train for `stop.env_steps`, a generation, each in a run of its own that begins with the weights of a run of the
generation before (`init_from`). Of each generation the worst quarter takes over the weights and settings of members of
the best quarter, and changes the settings; all others continue their own. The score of a run is its newest mean return:
the best of many means of a few episodes is luck. Every decision follows from the scores and the seed, so that a
population that is interrupted continues as it would have. `population.jsonl` has each in words.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hydra.core.override_parser.types import IntervalSweep, Override

from seedrl.commandline.members import Score, Status, read_table
from seedrl.commandline.search import chosen, typed_values
from seedrl.commandline.settings import Vocabulary
from seedrl.config import SweptRunConfig
from seedrl.errors import require
from seedrl.launching.overrides import override
from seedrl.run.directory import write_atomically

JOURNAL = "population.jsonl"
QUARTER = 4  # the worst and the best of so many parts
# Schedules that would end with every generation; a line may give other values.
CONSTANT = ("algorithm.learning_rate_end=null", "algorithm.entropy_cost_end=null")

NOTHING = Score(-math.inf, -math.inf)  # of a run that failed, or in which no episode has ended

Values = dict[str, Any]  # by setting


@dataclass(frozen=True, slots=True)
class Decision:
    """The beginning of one member in one generation."""

    generation: int
    member: int
    run: int
    parent: int | None  # the run whose weights it begins with
    values: Values
    because: str


def constant_schedules(fixed: Sequence[str]) -> list[str]:
    """Return overrides that keep schedules from ending with each generation, where the line says nothing of them."""
    named = {each.partition("=")[0] for each in fixed}
    return [each for each in CONSTANT if each.partition("=")[0] not in named]


def check_population(config: SweptRunConfig, varied: Sequence[Override]) -> None:
    """Refuse a population that could not evolve."""
    sweep = config.sweep
    require(sweep.population >= 2, f"sweep.population={sweep.population} must be at least 2, or 0 for none")
    require(sweep.generations >= 1, f"sweep.generations={sweep.generations} must be at least 1")
    require(sweep.factor > 1, f"sweep.factor={sweep.factor:g} must be larger than 1")
    require(not sweep.trials, "sweep.trials and sweep.population are two ways to choose values; give one of them")
    example = "'algorithm.learning_rate=tag(log,interval(1e-4,1e-2))'"
    require(bool(varied), f"sweep.population={sweep.population} needs a setting to change, such as {example}")


class Population:
    """The runs of all generations. Owned by the main thread."""

    def __init__(
        self, config: SweptRunConfig, vocabulary: Vocabulary, varied: Sequence[Override], directory: Path
    ) -> None:
        check_population(config, varied)
        self._size = config.sweep.population
        self._seed = config.seed
        self._goal = math.inf if config.stop.return_mean_100 is None else config.stop.return_mean_100
        self._settings = [Explored(each, vocabulary, config.sweep.factor) for each in varied]
        self._directory = directory
        self.count = self._size * config.sweep.generations
        self._scores = _known_scores(directory)
        self._decisions: list[Decision] = []
        self._asked = 0

    def ask(self) -> tuple[int, list[str]] | None:
        """Return the next run; None also while runs of the generation before it have not ended."""
        if self._asked >= self.count or any(score.best >= self._goal for score in self._scores.values()):
            return None
        if self._asked == len(self._decisions) and not self._decide():
            return None
        decision = self._decisions[self._asked]
        self._asked += 1
        return decision.run, self._overrides(decision)

    def tell(self, number: int, score: Score | None) -> None:
        self._scores[number] = NOTHING if score is None else score
        self._write_journal()

    def _overrides(self, decision: Decision) -> list[str]:
        values = [chosen(key, value) for key, value in decision.values.items()]
        start = [] if decision.parent is None else [override("init_from", str(self._directory / str(decision.parent)))]
        return [*values, *start, override("seed", self._seed + decision.run)]

    def _decide(self) -> bool:
        """Decide on the next generation, if the one before has ended; return whether it has."""
        generation = len(self._decisions) // self._size
        before = self._decisions[-self._size :]
        if any(decision.run not in self._scores for decision in before):
            return False
        random = np.random.default_rng([self._seed, generation])
        self._decisions += self._next(generation, before, random) if before else self._first(random)
        self._write_journal()
        return True

    def _write_journal(self) -> None:
        lines = (json.dumps(asdict(decision) | {"score": self._score(decision)}) for decision in self._decisions)
        write_atomically(self._directory / JOURNAL, "".join(f"{line}\n" for line in lines))

    def _score(self, decision: Decision) -> float | None:
        newest = self._scores.get(decision.run, NOTHING).newest
        return newest if math.isfinite(newest) else None

    def _first(self, random: np.random.Generator) -> list[Decision]:
        decisions = []
        for member in range(self._size):
            values = {setting.key: setting.start(member, random) for setting in self._settings}
            decisions.append(Decision(0, member, member, None, values, f"starts with {_words(values)}"))
        return decisions

    def _next(self, generation: int, before: list[Decision], random: np.random.Generator) -> list[Decision]:
        ranked = sorted(before, key=lambda decision: -self._scores[decision.run].newest)
        part = max(1, self._size // QUARTER)
        best, worst = ranked[:part], {decision.member for decision in ranked[-part:]}
        decisions = []
        for own in before:
            run = generation * self._size + own.member
            if own.member not in worst:
                because = f"continues: number {1 + ranked.index(own)} of {self._size} with {self._shown(own)}"
                decisions.append(Decision(generation, own.member, run, own.run, own.values, because))
                continue
            model = best[random.integers(len(best))]
            values = {setting.key: setting.changed(model.values[setting.key], random) for setting in self._settings}
            because = (
                f"takes the weights of member {model.member}, which had {self._shown(model)}, in place of its own, "
                f"which had {self._shown(own)}, and changes {_words(model.values)} to {_words(values)}"
            )
            decisions.append(Decision(generation, own.member, run, model.run, values, because))
        return decisions

    def _shown(self, decision: Decision) -> str:
        score = self._score(decision)
        return "no return" if score is None else f"a return of {score:,.2f}"


class Explored:
    """One setting of a population: where members start, and how its value changes. Knows nothing of the others."""

    def __init__(self, varied: Override, vocabulary: Vocabulary, factor: float) -> None:
        self.key = varied.get_key_element()
        self._factor = factor
        setting = vocabulary.find(varied.key_or_group)
        self._is_whole = setting is not None and int in setting.types and float not in setting.types
        value: Any = varied.value()
        self._interval = value if isinstance(value, IntervalSweep) else None
        self._choices = [] if self._interval else [each.partition("=")[2] for each in typed_values(varied, vocabulary)]

    def start(self, member: int, random: np.random.Generator) -> Any:
        """Return the value that a member starts with: drawn from an interval, or in turn from a list."""
        if self._interval is None:
            return self._choices[member % len(self._choices)]
        low, high = float(self._interval.start), float(self._interval.end)  # type: ignore[arg-type]
        if "log" in self._interval.tags:
            return self._rounded(math.exp(random.uniform(math.log(low), math.log(high))))
        return self._rounded(random.uniform(low, high))

    def changed(self, value: Any, random: np.random.Generator) -> Any:
        """Return the value multiplied or divided by the factor; of a list, any."""
        if self._interval is None:
            return self._choices[random.integers(len(self._choices))]
        return self._rounded(value * (self._factor if random.random() < 0.5 else 1 / self._factor))

    def _rounded(self, value: float) -> float | int:
        return max(1, round(value)) if self._is_whole else float(f"{value:.4g}")


def _words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())


def _known_scores(directory: Path) -> dict[int, Score]:
    """Return the scores of runs that an earlier process has ended."""
    ended = [member for member in read_table(directory).values() if member.status in (Status.DONE, Status.FAILED)]
    return {each.number: each.score or NOTHING for each in ended}
