"""Texts that a peer sends, made safe to use. Knows nothing of the messages that hold them."""

import json
from typing import Any

from seedrl.errors import InvalidMessage


def printable(text: str, length: int) -> str:
    """Return the beginning of a text, safe to show in logs and terminals."""
    return "".join(char if char.isprintable() else "?" for char in text[:length])


def decode_options(field: str, text: str) -> dict[str, Any]:
    """Return the object that a JSON text holds. Raises InvalidMessage for any other text."""
    try:
        options = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidMessage(f"{field}: expected JSON, saw {text[:32]!r}") from error
    if not isinstance(options, dict):
        raise InvalidMessage(f"{field}: expected an object, saw {type(options).__name__}")
    return options
