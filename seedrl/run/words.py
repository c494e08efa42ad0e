"""Arguments of a command that have no key, such as the run in `seedrl eval RUN`, turned into settings.

Knows nothing of what the settings mean.
"""

from collections.abc import Sequence
from pathlib import Path

from seedrl.errors import ConfigError
from seedrl.launching.overrides import override
from seedrl.run.finding import is_run

RUN_DIR = "run_dir"  # the setting of commands that train: a word for it has to name a run that exists


def words_as_settings(arguments: Sequence[str], words_into: str, run_into: str) -> list[str]:
    """Return the arguments with every plain word turned into a setting.

    Words go into the list `words_into`, and a run into `run_into`; either may be empty for none. With both, a word that
    is a directory is the run.
    """
    words, others = _split(arguments)
    runs = [word for word in words if not words_into or Path(word).is_dir()] if run_into else []
    rest = [word for word in words if word not in runs]
    if len(runs) > 1:
        raise ConfigError(f"{' and '.join(runs)} are {len(runs)} runs, and this command takes one")
    if rest and not words_into:
        return list(arguments)
    return [*others, *([override(words_into, rest)] if rest else []), *(_run(run_into, word) for word in runs)]


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate words from settings and options; a word after an option, as in `--cfg job`, belongs to the option.

    A directory is a word although there may be a "=" in its name.
    """
    words: list[str] = []
    others: list[str] = []
    for last, argument in zip(["", *arguments], arguments, strict=False):
        is_word = "-" not in (argument[:1], last[:1]) and ("=" not in argument or Path(argument).is_dir())
        (words if is_word else others).append(argument)
    return words, others


def _run(setting: str, word: str) -> str:
    if setting == RUN_DIR and not is_run(Path(word)):
        raise ConfigError(
            f"{word} is no run to resume: there is no {Path(word) / 'config.yaml'}; settings are key=value, such as "
            "env=cartpole"
        )
    return override(setting, word)
