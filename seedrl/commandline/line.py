"""Reads the arguments of a command: settings, plain words, and options, in any order. Knows nothing of Hydra."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from seedrl.commandline.command import RUN_DIR, Command
from seedrl.commandline.settings import Vocabulary
from seedrl.commandline.suggestions import did_you_mean
from seedrl.errors import ConfigError
from seedrl.launching.overrides import override

HELP = ("--help", "-h")
VERSION = ("--version",)
SWEEP = ("--multirun", "-m")
SHOW = ("--cfg", "-c")  # --cfg job prints the settings and runs nothing
ALL = "all"  # --help all
# Hydra's own, with the number of words that follow.
HYDRAS = {
    **dict.fromkeys(("--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--package", "-p"), 1),
    **dict.fromkeys(("--hydra-help", "--resolve", "--info", "-i"), 0),
}


@dataclass
class Line:
    """The arguments of a command, sorted."""

    overrides: list[str] = field(default_factory=list)  # key=value, as typed
    hydras: list[str] = field(default_factory=list)  # Hydra's own options
    help: str | None = None  # what --help is asked for: nothing, or all
    asks_version: bool = False
    is_sweep: bool = False
    shows: str = ""  # what --cfg is asked for

    @property
    def is_question(self) -> bool:
        """Return whether this is answered without running anything. What only Hydra can answer is left to it."""
        return self.asks_version or self.help is not None or (self.shows == "job" and not self.hydras)


def read(command: Command, vocabulary: Vocabulary, arguments: Sequence[str]) -> Line:
    """Sort the arguments of a command. Raises ConfigError for an option that does not exist."""
    line, words = Line(), list[str]()
    rest = iter(arguments)
    for argument in rest:
        name, _, value = argument.partition("=")
        if argument in HELP:
            line.help = ALL if ALL in arguments else ""
        elif argument in VERSION:
            line.asks_version = True
        elif argument in SWEEP:
            line.is_sweep = True
        elif name in SHOW:
            line.shows = value or next(rest, "job")
        elif name in HYDRAS:
            line.hydras += [argument, *([next(rest, "")] if HYDRAS[name] and not value else [])]
        elif argument.startswith("-"):
            line.overrides.append(_setting_of_flag(vocabulary, argument, next(rest, "")))
        elif ("=" in argument and not Path(argument).is_dir()) or argument.startswith("~"):
            line.overrides.append(argument)
        else:
            words.append(argument)
    if line.help is None:
        line.overrides += _settings_of_words(command, vocabulary, words)
    return line


def _setting_of_flag(vocabulary: Vocabulary, argument: str, following: str) -> str:
    """Return `json=true` for `--json`, and so on for every setting that is false by default; refuse others."""
    key, has_value, value = argument.lstrip("-").partition("=")
    flags = [setting.key for setting in vocabulary.settings.values() if setting.default is False]
    if argument == f"--{key}" and key in flags:
        return f"{key}=true"
    if key in vocabulary.settings or key in vocabulary.presets:
        example = value if has_value else following or "VALUE"
        raise ConfigError(f"there is no option {argument}; settings are written without dashes: {key}={example}")
    options = [f"--{flag}" for flag in flags] + [*HELP, *VERSION, *SWEEP, *SHOW]
    hint = did_you_mean(f"--{key}", options) or did_you_mean(key, _keys(vocabulary), "{}=VALUE")
    raise ConfigError(f"there is no option --{key}{hint or f'; {see_help(vocabulary)}'}")


def _settings_of_words(command: Command, vocabulary: Vocabulary, words: Sequence[str]) -> Iterator[str]:
    """Turn the words of `plot A B` into runs=[A,B], and that of `eval A` into run=A; refuse others.

    Where a command takes a run as well as other words, a word that is a directory is the run.
    """
    runs = [word for word in words if not command.words or Path(word).is_dir()] if command.run else []
    rest = [word for word in words if word not in runs]
    if len(runs) > 1:
        raise ConfigError(f"{' and '.join(runs)} are {len(runs)} runs, and this command takes one")
    if rest and not command.words:
        raise ConfigError(_no_setting(vocabulary, rest[0]))
    if rest:
        yield override(command.words, rest)
    for word in runs:
        _refuse_if_not_to_resume(command, vocabulary, word)
        yield override(command.run, word)


def _refuse_if_not_to_resume(command: Command, vocabulary: Vocabulary, word: str) -> None:
    """Refuse a word for a command that trains unless it is a run: `seedrl run pong` would train something else."""
    from seedrl.run.finding import is_run

    if command.run != RUN_DIR or is_run(Path(word)):
        return
    if not Path(word).exists():
        raise ConfigError(_no_setting(vocabulary, word))
    raise ConfigError(f"{word} is no run to resume: there is no {Path(word) / 'config.yaml'}")


def _no_setting(vocabulary: Vocabulary, word: str) -> str:
    """Return why a word alone means nothing to this command."""
    for group, presets in vocabulary.presets.items():
        if word in presets:
            return f"{word} alone is no setting; did you mean {group}={word}?"
    if word in vocabulary.settings or word in vocabulary.presets:
        return f"{word} needs a value: {word}=VALUE"
    hint = did_you_mean(word, _keys(vocabulary), "{}=VALUE")
    what = "neither a setting, which would be key=value, nor a run" if vocabulary.resumes else "no setting, key=value"
    return f"{word} is {what}{hint or f'; {see_help(vocabulary)}'}"


def _keys(vocabulary: Vocabulary) -> list[str]:
    return [*vocabulary.presets, *vocabulary.settings]


def see_help(vocabulary: Vocabulary) -> str:
    """Return where all settings of a command are listed."""
    return f"seedrl {vocabulary.command} --help {ALL} lists the settings"
