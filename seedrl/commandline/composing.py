"""Composes the settings of a command from conf/ and overrides, as plain dataclasses; errors are one sentence.

With `checking` and `sweeping` the only modules that use Hydra. Knows no setting.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from seedrl.commandline.checking import checked, unknown, value_of, wrong_value
from seedrl.commandline.line import Line
from seedrl.commandline.settings import Vocabulary, conf_directory, shown
from seedrl.config import MISSING
from seedrl.errors import ConfigError

NOT_FOR_PEOPLE = ("full_key", "object_type", "reference_type", "See https")  # lines in messages of OmegaConf and Hydra


def compose(vocabulary: Vocabulary, overrides: Sequence[str]) -> Any:
    """Return the settings that a command has with these overrides, complete. Raises ConfigError if that fails."""
    settings = composed(vocabulary, overrides)
    return complete(vocabulary, settings)


def composed(vocabulary: Vocabulary, overrides: Sequence[str]) -> DictConfig:
    """Return the settings as Hydra has them, where some may be missing."""
    register(vocabulary.command, vocabulary.schema)
    accepted = neutral_if_own_env(checked(vocabulary, overrides))
    try:
        with hydra.initialize_config_dir(str(conf_directory()), version_base="1.3"):
            return hydra.compose(vocabulary.command, accepted)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_in_a_sentence(vocabulary, error, accepted)) from error


def complete(vocabulary: Vocabulary, settings: DictConfig) -> Any:
    """Return composed settings as plain dataclasses; refuse those that lack one."""
    if missing := sorted(OmegaConf.missing_keys(settings)):
        name = vocabulary.command
        raise ConfigError(f"{', '.join(missing)} must be given; seedrl {name} --help explains each")
    try:
        return OmegaConf.to_object(settings)
    except OmegaConfBaseException as error:
        raise ConfigError(_in_a_sentence(vocabulary, error, ())) from error


def preview(vocabulary: Vocabulary, overrides: Sequence[str]) -> dict[str, str]:
    """Return the values that a line gives to all settings, as help shows them."""
    settings = composed(vocabulary, overrides)
    values = {key: OmegaConf.select(settings, key) for key in vocabulary.settings}
    missing = OmegaConf.missing_keys(settings)
    return {
        key: shown(MISSING if key in missing else OmegaConf.to_object(value) if OmegaConf.is_config(value) else value)
        for key, value in values.items()
    }


def as_yaml(vocabulary: Vocabulary, overrides: Sequence[str]) -> str:
    """Return the settings as YAML, for --cfg job."""
    return OmegaConf.to_yaml(composed(vocabulary, overrides)).rstrip()


def run_by_hydra(vocabulary: Vocabulary, line: Line, task: Callable[[Any, Sequence[str]], None]) -> None:
    """Let Hydra compose the settings and run the task: for its own options, and for launchers such as submitit's."""
    name = vocabulary.command
    register(name, vocabulary.schema)

    def run(settings: DictConfig) -> None:
        task(complete(vocabulary, settings), list(HydraConfig.get().overrides.task))

    shows = ["--cfg", line.shows] if line.shows else []
    overrides = neutral_if_own_env(checked(vocabulary, line.overrides, line.is_sweep))
    sys.argv = [f"seedrl {name}", *line.hydras, *shows, *(["--multirun"] if line.is_sweep else []), *overrides]
    hydra.main(version_base="1.3", config_path=str(conf_directory()), config_name=name)(run)()


def neutral_if_own_env(overrides: Sequence[str]) -> list[str]:
    """Let `env.id=X` without `env=` start from the defaults instead of from those of another environment."""
    names = {text.partition("=")[0] for text in overrides}
    return ["env=any", *overrides] if "env.id" in names and not {"env", "experiment"} & names else list(overrides)


@functools.cache
def register(name: str, schema: type) -> None:
    """Register a schema with Hydra, once per process. Free settings may have any keys."""
    node = OmegaConf.structured(schema)
    for setting in Vocabulary(name, schema).settings.values():
        if setting.is_free:
            OmegaConf.set_struct(OmegaConf.select(node, setting.key), False)
    ConfigStore.instance().store(name=f"{name}_schema", node=node)


def _in_a_sentence(vocabulary: Vocabulary, error: Exception, overrides: Sequence[str]) -> str:
    """Return what is wrong with the settings, for errors of Hydra and OmegaConf."""
    cause = _cause(error)
    key = getattr(cause, "full_key", None) or ""
    setting = vocabulary.find(key)
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and key and setting is None:
        return unknown(vocabulary, key)
    if isinstance(cause, ValidationError) and setting is not None:
        values = list(value_of(overrides, setting.key))
        return wrong_value(setting, values[-1]) if values else f"{setting.key} must be {setting.kind}: {_first(cause)}"
    return _first(cause)


def _cause(error: BaseException) -> BaseException:
    """Return the error of OmegaConf behind one of Hydra's, if there is one."""
    while error.__cause__ is not None and not isinstance(error, OmegaConfBaseException):
        error = error.__cause__
    return error


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(line for line in lines if not line.startswith(NOT_FOR_PEOPLE))
