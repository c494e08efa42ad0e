"""The declaration of a setting: its default and the sentence that `--help` shows for it. Knows no setting."""

import copy
from dataclasses import field
from typing import Any


def key(default: Any, meaning: str) -> Any:
    """Declare a setting with its default and its meaning."""
    return field(default_factory=lambda: copy.deepcopy(default), metadata={"meaning": meaning})


def group(schema: type) -> Any:
    """Declare a group of settings."""
    return field(default_factory=schema)
