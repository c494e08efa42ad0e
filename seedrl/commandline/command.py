"""The record of a command of `seedrl`. Knows no command."""

from collections.abc import Callable
from dataclasses import dataclass

RUN_DIR = "run_dir"  # the setting of commands that train: a word for it has to name a run that exists


@dataclass(frozen=True)
class Command:
    """A command of `seedrl`: its line of help, its settings, and the function that runs it."""

    meaning: str
    schema: type
    start: Callable[..., None]  # gets the settings, and the overrides that they were composed of if takes_overrides
    takes_overrides: bool = False
    is_lasting: bool = False  # whether it outlives the reader of its output
    verbs: tuple[tuple[str, str, str], ...] = ()  # subcommands on files: the word, its arguments, its line of help
    on_files: Callable[..., int] | None = None  # runs a verb on files, and returns the exit code
    words: str = ""  # the setting that arguments without a key are for, such as orders
    run: str = ""  # the setting that a run without a key is for
    examples: tuple[str, ...] = ()  # command lines without `seedrl`, for the first screen of help
    often: tuple[str, ...] = ()  # the settings that people change, for the first screen of help; empty for all
