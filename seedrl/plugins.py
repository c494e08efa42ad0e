"""The user's own code, named in a setting: classes by import path (`model.name=my_models:Linear`), environments by id.

Knows no model, algorithm or environment.
"""

import importlib
from collections.abc import Iterable
from typing import Any

from seedrl.errors import ConfigError

OWN = "own"  # env.id of environments that actors bring; own/NAME gives them a name


def is_import_path(name: str) -> bool:
    """Return whether a setting names a class of the user's own rather than a built-in one."""
    return ":" in name


def is_own(env_id: str) -> bool:
    """Return whether actors bring the environment."""
    return env_id.partition("/")[0] == OWN


def modules_of(env_id: str, wrappers: Iterable[str]) -> list[str]:
    """Return the Python modules that actors have to import for an environment."""
    paths = [*([env_id] if is_import_path(env_id) else []), *wrappers]
    return [path.partition(":")[0] for path in paths]


def build(setting: str, path: str, *arguments: Any, **options: Any) -> Any:
    """Import `module:Class` and call it. Raises ConfigError naming the setting if that fails."""
    module_name, _, class_name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)(*arguments, **options)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{setting}={path} could not be built: {error}") from error
