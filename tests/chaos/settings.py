"""key=value words as the fields of a dataclass."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeVar

Settings = TypeVar("Settings")


def from_words(schema: type[Settings], words: Sequence[str]) -> Settings:
    """Refuses words that are no fields; values have the types of the defaults."""
    known: dict[str, Any] = {each.name: type(each.default) for each in fields(schema)}  # type: ignore[arg-type]
    given = dict(word.partition("=")[::2] for word in words)
    if unknown := given.keys() - known.keys():
        raise SystemExit(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    return schema(**{name: known[name](value) for name, value in given.items()})
