"""The user's own code, named in a setting: classes by import path (`model.name=my_models:Linear`), environments by id.

The one place that imports it. Knows no model, algorithm or environment.
"""

import difflib
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

from seedrl.errors import ConfigError, require
from seedrl.tracebacks import failed

OWN = "own"  # env.id of environments that actors bring; own/NAME gives them a name


def is_import_path(name: str) -> bool:
    """Return whether a setting names a class of the user's own rather than a built-in one."""
    return ":" in name


def check_name(setting: str, name: str, built_in: Sequence[str]) -> None:
    """Refuse a name that is neither built in nor an import path, before torch is imported to build it."""
    require(
        name in built_in or is_import_path(name),
        f"{setting}={name} is none of {', '.join(built_in)}, and not your.module:Class either",
    )


def is_own(env_id: str) -> bool:
    """Return whether actors bring the environment."""
    return env_id.partition("/")[0] == OWN


def modules_of(env_id: str, wrappers: Iterable[str]) -> list[str]:
    """Return the Python modules that actors have to import for an environment."""
    paths = [*([env_id] if is_import_path(env_id) else []), *wrappers]
    return [path.partition(":")[0] for path in paths]


def build(setting: str, path: str, *arguments: Any, **options: Any) -> Any:
    """Import `module:Class` and call it. Raises ConfigError naming the setting if that fails."""
    found = load(setting, path)
    try:
        return found(*arguments, **options)
    except Exception as error:
        raise failed(ConfigError, f"{setting}={path} could not be built", error) from error


def load(setting: str, path: str) -> Any:
    """Import `module:name` and return what has that name. Raises ConfigError naming the setting if there is none."""
    module_name, _, name = path.partition(":")
    module = import_module(setting, path)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
        raise ConfigError(f"{setting}={path}: {module_name} has no {name or 'such name'}{hint}")
    return getattr(module, name)


def import_module(setting: str, path: str) -> ModuleType:
    """Import the module of `module:name`, also from the working directory. Raises ConfigError naming the setting."""
    name = path.partition(":")[0]
    _search_the_working_directory()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):  # itself, and not what it imports
            raise ConfigError(
                f"{setting}={path}: there is no module {error.name}, neither installed nor in {os.getcwd()}"
            ) from error
        raise failed(ConfigError, f"{setting}={path} could not be imported", error) from error
    except (Exception, SystemExit) as error:
        raise failed(ConfigError, f"{setting}={path} could not be imported", error) from error


def _search_the_working_directory() -> None:
    """Find modules in the working directory: `python -m seedrl` does so, and the script `seedrl` would not."""
    here = os.getcwd()
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)
