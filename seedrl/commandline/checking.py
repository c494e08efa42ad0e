"""Checks overrides before Hydra composes them: keys and presets exist, whole numbers are whole, sweeps are asked for.

Hydra itself would add an unknown key that has a `+`, and train without it. Here every key has to be in the schema;
only below free settings such as env.options a key may be new. Knows nothing of how settings fit together.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException

from seedrl.commandline.line import see_help
from seedrl.commandline.settings import Setting, Vocabulary
from seedrl.commandline.suggestions import did_you_mean, nearest
from seedrl.errors import ConfigError
from seedrl.launching.overrides import override


def checked(vocabulary: Vocabulary, overrides: Iterable[str], is_sweep: bool = False) -> list[str]:
    """Return the overrides as Hydra takes them. Raises ConfigError for one that means nothing here."""
    return [_checked(vocabulary, text, is_sweep) for text in overrides]


def _checked(vocabulary: Vocabulary, text: str, is_sweep: bool) -> str:
    text, parsed = _parsed(vocabulary, text)
    key = parsed.key_or_group
    if parsed.is_hydra_override():
        return text
    if key in vocabulary.presets:
        _check_presets(vocabulary, parsed, is_sweep)
        return text.lstrip("+")
    setting = vocabulary.find(key)
    if setting is None:
        raise ConfigError(unknown(vocabulary, key))
    is_free = setting.key != key
    if parsed.is_delete():
        if not is_free:
            raise ConfigError(f"~{key} would remove a setting; give it another value: {key}={setting.shown}")
        return text
    _check_sweep(parsed, text, is_sweep)
    return f"{'++' if is_free else ''}{key}={_value(setting, parsed, text)}"


def _parsed(vocabulary: Vocabulary, text: str) -> tuple[str, Override]:
    """Parse an override. Text that Hydra's grammar could not hold without quotes, such as A=B, gets them."""
    key, _, value = text.partition("=")
    setting = vocabulary.settings.get(key.lstrip("+"))
    attempts = [text, override(key, value)] if setting is not None and str in setting.types else [text]
    for attempt in attempts:
        try:
            return attempt, OverridesParser.create().parse_override(attempt)
        except HydraException:
            continue
    if vocabulary.find(key.lstrip("+~")) is None and key.lstrip("+~") not in vocabulary.presets:
        raise ConfigError(unknown(vocabulary, key.lstrip("+~")))
    raise ConfigError(f"{text} cannot be read; a value with special characters needs quotes: \"{key}='…'\"")


def unknown(vocabulary: Vocabulary, key: str) -> str:
    """Return why there is no such setting, with the one that was probably meant."""
    if key in vocabulary.sections:
        inside = [each for each in vocabulary.settings if each.startswith(f"{key}.")]
        return f"{key} is a group of settings: {', '.join(inside)}"
    hint = did_you_mean(key, [*vocabulary.presets, *vocabulary.settings])
    return f"there is no setting {key}{hint or f'; {see_help(vocabulary)}'}"


def _check_presets(vocabulary: Vocabulary, parsed: Override, is_sweep: bool) -> None:
    """Refuse a preset that is not in conf/."""
    group = parsed.key_or_group
    if parsed.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return
    _check_sweep(parsed, f"{group}=…", is_sweep)
    values = list(parsed.sweep_string_iterator()) if parsed.is_discrete_sweep() else [parsed.value()]
    for value in values:
        if value not in (None, "null", "", *vocabulary.presets[group]):
            raise ConfigError(_no_preset(vocabulary, group, str(value)))


def _no_preset(vocabulary: Vocabulary, group: str, value: str) -> str:
    presets = vocabulary.presets[group]
    meant = [f"{group}={each}" for each in nearest(value, presets)]
    by_name = next((key for key in (f"{group}.id", f"{group}.name") if key in vocabulary.settings), "")
    if by_name and not value.islower():  # an environment's id, or a class
        meant.append(f"{by_name}={value}")
    hint = f"did you mean {' or '.join(meant)}?" if meant else f"there are {', '.join(presets)}"
    return f"there is no preset {group}={value}; {hint}"


def _check_sweep(parsed: Override, text: str, is_sweep: bool) -> None:
    """Refuse several values where one is wanted."""
    if not parsed.is_sweep_override() or is_sweep:
        return
    value = text.partition("=")[2]
    in_thousands = re.fullmatch(r"\d{1,3}(,\d{3})+", value)
    number = f"; a number has no commas: {parsed.key_or_group}={value.replace(',', '')}" if in_thousands else ""
    raise ConfigError(f"{text} has several values, which -m runs one after another{number}")


def _value(setting: Setting, parsed: Override, text: str) -> str:
    """Return the value as typed; a whole number may be written 1e6."""
    value: Any = parsed.value()
    if int in setting.types and float not in setting.types and isinstance(value, float):
        if not value.is_integer():
            raise ConfigError(wrong_value(setting, text.partition("=")[2]))
        return str(int(value))
    return text.partition("=")[2]


def wrong_value(setting: Setting, value: str) -> str:
    """Return why a setting cannot have this value."""
    hint = did_you_mean(value, setting.choices) if setting.choices else ""
    return f"{setting.key}={value} must be {setting.kind}{hint}"


def value_of(overrides: Iterable[str], key: str) -> Iterator[str]:
    """Yield the values that overrides give to a key, as typed."""
    for text in overrides:
        name, _, value = text.partition("=")
        if name.lstrip("+") == key:
            yield value
