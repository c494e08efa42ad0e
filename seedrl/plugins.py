"""Classes of the user's own code, named by import path in a setting: `model.name=my_models:Linear`."""

import importlib
from typing import Any

from seedrl.errors import ConfigError


def is_import_path(name: str) -> bool:
    """Return whether a setting names a class of the user's own rather than a built-in one."""
    return ":" in name


def build(setting: str, path: str, *arguments: Any, **options: Any) -> Any:
    """Import `module:Class` and call it. Raises ConfigError naming the setting if that fails."""
    module_name, _, class_name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)(*arguments, **options)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{setting}={path} could not be built: {error}") from error
