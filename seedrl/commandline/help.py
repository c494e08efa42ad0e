"""The help of commands: one screen with what people need first, and `--help all` with every setting. Knows no command.

The first screen shows the values that this line gives the settings, so `seedrl run env=pong --help` has Pong's.
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from seedrl.commandline.command import Command
from seedrl.commandline.settings import Setting, Vocabulary
from seedrl.version import __version__

WIDTH = 100
ALL_FLAG = "--help all: every setting"
CFG_FLAG = "--cfg job: all values of a line"
HYDRA_FLAG = "--hydra-help: the options of Hydra, which composes the settings"
SWEEP_FLAG = "-m: a run for each combination of values"


def overview(commands: Mapping[str, Command]) -> str:
    """Return the help of `seedrl` itself."""
    lines = [f"seedrl {__version__}: central inference for reinforcement learning", ""]
    lines += [f"  seedrl {name:<8} {command.meaning}" for name, command in commands.items()]
    lines += ["", "seedrl COMMAND --help explains a command. A first run: seedrl run env=cartpole"]
    lines += ['Tab completion: eval "$(seedrl completion)", for good in ~/.bashrc or ~/.zshrc']
    return "\n".join(lines)


def first_screen(command: Command, vocabulary: Vocabulary, values: Mapping[str, str]) -> str:
    """Return one screen: usage, examples, and the settings that people change with the values they have here."""
    often = command.often or tuple(vocabulary.settings)
    settings = [vocabulary.settings[key] for key in often]
    lines = [*_usage(command, vocabulary), ""]
    if command.examples:
        lines += [*(f"  seedrl {example}" for example in command.examples), ""]
    lines += list(_rows(settings, values))
    rest = len(vocabulary.settings) - len(settings)
    lines += ["", *_flags(vocabulary, [*([ALL_FLAG] if rest else []), CFG_FLAG])]
    return "\n".join(lines)


def every_setting(command: Command, vocabulary: Vocabulary) -> str:
    """Return the help with every preset and every setting, its default and meaning."""
    lines = [*_usage(command, vocabulary), ""]
    for group, presets in vocabulary.presets.items():
        lines += _wrapped(f"  {group}=", "|".join(presets).replace("|", " | "))
    lines += ["", "Settings and their defaults, which presets may change:", ""]
    settings = list(vocabulary.settings.values())
    lines += _rows(settings, {setting.key: setting.shown for setting in settings})
    lines += ["", *_flags(vocabulary, [CFG_FLAG, HYDRA_FLAG])]
    return "\n".join(lines)


def _flags(vocabulary: Vocabulary, flags: Sequence[str]) -> list[str]:
    return _wrapped("", "; ".join([*flags, *([SWEEP_FLAG] if "sweep" in vocabulary.sections else [])]), 0)


def _usage(command: Command, vocabulary: Vocabulary) -> list[str]:
    name = vocabulary.command
    words = f"{command.words.upper()} … " if command.words else ""
    words += "[RUN] " if command.run else ""
    lines = _wrapped(f"seedrl {name} {words}key=value …    ", command.meaning)
    for verb, files, meaning in command.verbs:
        lines += _wrapped(f"seedrl {name} {verb} {files}    ", meaning)
    return lines


def _rows(settings: Iterable[Setting], values: Mapping[str, str]) -> Iterator[str]:
    """Yield each setting with its value and meaning."""
    settings = list(settings)
    width = min(34, max(len(f"{setting.key}={values[setting.key]}") for setting in settings))
    for setting in settings:
        yield from _wrapped(
            f"  {setting.key}={values[setting.key]}".ljust(width + 2) + "  ", setting.meaning, width + 4
        )


def _wrapped(start: str, text: str, indent: int = 6) -> list[str]:
    """Return a text over several lines if it has to be, all of them indented like the first one's text."""
    lines = textwrap.wrap(
        start + text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, drop_whitespace=True
    )
    return lines or [start]
