"""The settings that a command has: keys, types, defaults, meanings and presets. Knows nothing of Hydra."""

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

EXPERIMENT = "experiment"  # the group of presets that belongs to no section of the settings


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a schema."""

    key: str  # with the names of its sections, such as algorithm.learning_rate
    type: Any
    default: Any
    meaning: str

    @property
    def shown(self) -> str:
        """Return the default as help shows it."""
        return shown(self.default)

    @property
    def types(self) -> tuple[Any, ...]:
        """Return the types that a value may have."""
        is_union = typing.get_origin(self.type) in (typing.Union, types.UnionType)
        return typing.get_args(self.type) if is_union else (self.type,)

    @property
    def is_free(self) -> bool:
        """Return whether the keys below this one are the user's, as those of env.options are."""
        return typing.get_origin(self.type) is dict

    @property
    def choices(self) -> list[str]:
        """Return the values that a value is chosen from; empty if there is no such list."""
        found: list[str] = []
        for kind in self.types:
            if isinstance(kind, type) and issubclass(kind, Enum):
                found += kind.__members__
            elif kind is bool:
                found += ["true", "false"]
            elif kind is type(None) and found:
                found.append("null")
        return found

    @property
    def kind(self) -> str:
        """Return what a value has to be, in words."""
        return " or ".join(_kind(each) for each in self.types)


KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    Any: "a value",
}


def _kind(kind: Any) -> str:
    if typing.get_origin(kind) is list:
        return f"a list such as [{_example(typing.get_args(kind)[0])}]"
    if typing.get_origin(kind) is dict:
        return "a mapping such as {key: value}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return f"one of {', '.join(kind.__members__)}"
    return KINDS[kind]


def _example(kind: Any) -> str:
    return "64,64" if kind is int else ",".join(kind.__members__) if issubclass(kind, Enum) else "a,b"


def shown(value: Any) -> str:
    """Return a value as help shows it."""
    if value == "???":
        return "required"
    if isinstance(value, str):
        return value or "''"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"[{','.join(map(shown, value))}]"
    return f"{value:,}".replace(",", "_") if isinstance(value, int) else str(value)


def settings_of(schema: type, prefix: str = "") -> Iterator[Setting]:
    """Yield every setting of a schema, depth first."""
    kinds = typing.get_type_hints(schema)
    for field in dataclasses.fields(schema):
        assert field.default_factory is not dataclasses.MISSING
        default = field.default_factory()
        if dataclasses.is_dataclass(default):
            yield from settings_of(type(default), f"{prefix}{field.name}.")
        else:
            yield Setting(f"{prefix}{field.name}", kinds[field.name], default, field.metadata["meaning"])


def conf_directory() -> Path:
    """Return conf/, which lies beside the package in a checkout and inside it in a wheel."""
    package = Path(__file__).parents[1]
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


@dataclass(frozen=True)
class Vocabulary:
    """All the words that may stand in a line of one command."""

    command: str
    schema: type
    resumes: bool = False  # whether run_dir may name a run whose settings are the defaults then

    @cached_property
    def settings(self) -> dict[str, Setting]:
        return {setting.key: setting for setting in settings_of(self.schema)}

    @cached_property
    def sections(self) -> set[str]:
        """Return the groups of settings, such as algorithm and algorithm.ppo."""
        keys = [key.split(".") for key in self.settings]
        return {".".join(parts[:depth]) for parts in keys for depth in range(1, len(parts))}

    @cached_property
    def presets(self) -> dict[str, list[str]]:
        """Return the presets of each group of conf/ that the command has."""
        return {
            group.name: sorted(path.stem for path in group.glob("*.yaml"))
            for group in sorted(conf_directory().iterdir())
            if group.is_dir() and group.name in self._groups
        }

    @property
    def _groups(self) -> set[str]:
        """Return the groups of presets: only commands that describe a run have any."""
        names = {field.name for field in dataclasses.fields(self.schema)}
        return names | {EXPERIMENT} if {"env", "algorithm"} <= names else set()

    def find(self, key: str) -> Setting | None:
        """Return the setting of this key, or the one whose free keys it is among."""
        if key in self.settings:
            return self.settings[key]
        above = key.rpartition(".")[0]
        found = self.find(above) if above else None
        return found if found is not None and found.is_free else None
