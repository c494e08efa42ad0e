"""The values that the runs of a sweep have: every combination, or those that Optuna chooses. Starts no run.

Both read the values from a line in Hydra's grammar: `seed=1,2,3`, `range(1,9)`, `interval(0.1,1)`, `tag(log, …)`.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep

from seedrl.commandline.members import Score
from seedrl.commandline.settings import Vocabulary
from seedrl.config import SweptRunConfig
from seedrl.errors import require
from seedrl.launching.overrides import override


class Search(Protocol):
    """The source of the values that runs have. Owned by the main thread."""

    count: int  # runs in all

    def ask(self) -> tuple[int, list[str]] | None:
        """Return the number of the next run and the overrides that only it has.

        None means that there is no further run, or none before one of those that are running has ended.
        """

    def tell(self, number: int, score: Score | None) -> None:
        """Take notice of how a run has ended; None if it failed, or no episode of it has ended."""


def split(overrides: Iterable[str]) -> tuple[list[str], list[Override]]:
    """Return the overrides that all runs have, and those with several values."""
    parsed = [(text, OverridesParser.create().parse_override(text)) for text in overrides]
    fixed = [text for text, each in parsed if not each.is_sweep_override()]
    return fixed, [each for _, each in parsed if each.is_sweep_override()]


def check_values(trials: int, varied: Sequence[Override]) -> None:
    """Refuse a sweep that has nothing to choose from, or would never end; populations have their own check."""
    require(trials >= 0, f"sweep.trials={trials} must not be negative")
    example = "'algorithm.learning_rate=interval(1e-4,1e-2)'"
    require(
        bool(varied) or not trials, f"sweep.trials={trials} needs a setting to choose values for, such as {example}"
    )
    for each in varied:
        require(
            bool(trials) or not each.is_interval_sweep(),
            f"{each.input_line} has no end of values: give sweep.trials=N, and Optuna chooses N of them",
        )


def search_of(config: SweptRunConfig, vocabulary: Vocabulary, varied: Sequence[Override], directory: Path) -> Search:
    """Return the search that the settings of a sweep without a population ask for."""
    if config.sweep.trials:
        return Optuna(varied, vocabulary, config.sweep.trials, config.seed, directory)
    return Grid(varied, vocabulary)


class Grid:
    """Every combination of the values, in the order in which they were typed."""

    def __init__(self, varied: Sequence[Override], vocabulary: Vocabulary) -> None:
        combinations = [list(each) for each in itertools.product(*(typed_values(each, vocabulary) for each in varied))]
        self.count = len(combinations)
        self._rest = iter(enumerate(combinations))

    def ask(self) -> tuple[int, list[str]] | None:
        return next(self._rest, None)

    def tell(self, number: int, score: Score | None) -> None:
        """Ignore it: the next combination does not depend on it."""


def typed_values(varied: Override, vocabulary: Vocabulary) -> Iterator[str]:
    """Yield an override for each value of one that has several."""
    key = varied.get_key_element()
    value: Any = varied.value()
    if isinstance(value, Glob):
        return (f"{key}={each}" for each in value.filter(vocabulary.presets.get(varied.key_or_group, [])))
    return (f"{key}={each}" for each in varied.sweep_string_iterator())


class Optuna:
    """Values that Optuna's TPE sampler chooses for the largest return. The study, in optuna.log, can be resumed."""

    def __init__(
        self, varied: Sequence[Override], vocabulary: Vocabulary, trials: int, seed: int, directory: Path
    ) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        self.count = trials
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._failed = optuna.trial.TrialState.FAIL
        self._distributions = {each.get_key_element(): _distribution(each, vocabulary) for each in varied}
        self._study = optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(directory / "optuna.log"))),
            study_name="sweep",
            direction="maximize",
            load_if_exists=True,
        )
        self._study.sampler = optuna.samplers.TPESampler(seed=seed + len(self._study.trials))  # draws nothing twice
        for trial in self._study.trials:  # those of an earlier process that was interrupted
            if not trial.state.is_finished():
                self.tell(trial.number, None)

    def ask(self) -> tuple[int, list[str]] | None:
        if len(self._study.trials) >= self.count:
            return None
        trial = self._study.ask(self._distributions)
        return trial.number, [chosen(key, value) for key, value in trial.params.items()]

    def tell(self, number: int, score: Score | None) -> None:
        if score is None:
            self._study.tell(number, state=self._failed)
        else:
            self._study.tell(number, score.best)


def chosen(key: str, value: Any) -> str:
    """Return the override for a value that was chosen."""
    return f"{key}={value}" if isinstance(value, str) else override(key, value)  # text is as it was typed


def _distribution(varied: Override, vocabulary: Vocabulary) -> Any:
    """Return Optuna's distribution for the values of an override."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    setting = vocabulary.find(varied.key_or_group)
    is_whole = setting is not None and int in setting.types and float not in setting.types
    value: Any = varied.value()
    if isinstance(value, IntervalSweep):
        is_log = "log" in value.tags
        if is_whole:
            return IntDistribution(int(value.start), int(value.end), log=is_log)  # type: ignore[arg-type]
        return FloatDistribution(float(value.start), float(value.end), log=is_log)  # type: ignore[arg-type]
    if isinstance(value, RangeSweep) and is_whole:
        steps = list(value.range())
        return IntDistribution(int(min(steps)), int(max(steps)), step=abs(int(value.step)))
    return CategoricalDistribution([each.partition("=")[2] for each in typed_values(varied, vocabulary)])
