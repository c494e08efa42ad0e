"""Reads back what `seedrl bench out=FILE` wrote: for comparing, plotting and tables. Measures nothing."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness import Ratio
from seedrl.errors import ConfigError

Stage = dict[str, Any]  # as Report.as_json gives it


@dataclass(frozen=True, slots=True)
class Document:
    """The stages of a suite, or the only one of a stage's own file."""

    fingerprint: dict[str, Any]
    stages: list[Stage]

    @property
    def ratios(self) -> dict[str, Ratio]:
        return {ratio.name: ratio for stage in self.stages for ratio in ratios_of(stage)}


def ratios_of(stage: Stage) -> list[Ratio]:
    """A stage's ratios with their repeats and bounds."""
    repeats, bounds, wall = (stage.get(key, {}) for key in ("repeats", "bounds", "wall"))
    return [
        Ratio(
            name,
            values=repeats.get(name, [value]),
            bound=bounds.get(name, {}).get("bound"),
            at_most=bounds.get(name, {}).get("at_most", True),
            wall=wall.get(name, {}).get("repeats", []),
        )
        for name, value in stage["ratios"].items()
    ]


def read(path: Path) -> Document:
    """Refuses what `seedrl bench` did not write."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; seedrl bench out={path} writes one") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}; give a file that seedrl bench out=FILE wrote") from error
    try:
        return document_of(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} holds no results of seedrl bench ({type(error).__name__}: {error}); "
            "give a file that seedrl bench out=FILE wrote"
        ) from error


def document_of(content: dict[str, Any]) -> Document:
    """Return the document of a file's content. Raises an error of Python's own if that is something else."""
    document = Document(content["fingerprint"], content.get("stages", [content]))
    if not all(min(ratio.values) > 0 for ratio in document.ratios.values()):  # of no values: ValueError, too
        raise ValueError("a ratio that is not positive")
    return document
