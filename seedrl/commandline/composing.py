"""Composes the settings of a command from conf/ and overrides, as plain dataclasses; errors are one sentence.

With `checking` and `sweeping` the only modules that use Hydra. Knows no setting.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from seedrl.commandline.checking import checked, unknown, value_of, wrong_value
from seedrl.commandline.command import RUN_DIR
from seedrl.commandline.line import Line
from seedrl.commandline.settings import Vocabulary, conf_directory, shown
from seedrl.config import MISSING, LearnerConfig
from seedrl.errors import ConfigError
from seedrl.run.directory import RunDirectory
from seedrl.run.finding import is_run

NOT_FOR_PEOPLE = ("full_key", "object_type", "reference_type", "See https")  # lines in messages of OmegaConf and Hydra


def compose(vocabulary: Vocabulary, overrides: Sequence[str]) -> Any:
    """Return the settings that a command has with these overrides, complete. Raises ConfigError if that fails."""
    settings = composed(vocabulary, overrides)
    return complete(vocabulary, settings)


def composed(vocabulary: Vocabulary, overrides: Sequence[str]) -> DictConfig:
    """Return the settings as Hydra has them, where some may be missing."""
    register(vocabulary.command, vocabulary.schema)
    name, accepted = _to_resume_or_start(vocabulary, checked(vocabulary, overrides))
    try:
        with hydra.initialize_config_dir(str(conf_directory()), version_base="1.3"):
            return hydra.compose(name, accepted)
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
    register(vocabulary.command, vocabulary.schema)

    def run(settings: DictConfig) -> None:
        task(complete(vocabulary, settings), list(HydraConfig.get().overrides.task))

    shows = ["--cfg", line.shows] if line.shows else []
    name, overrides = _to_resume_or_start(vocabulary, checked(vocabulary, line.overrides, line.is_sweep))
    sys.argv = [
        f"seedrl {vocabulary.command}",
        *line.hydras,
        *shows,
        *(["--multirun"] if line.is_sweep else []),
        *overrides,
    ]
    hydra.main(version_base="1.3", config_path=str(conf_directory()), config_name=name)(run)()


def neutral_if_own_env(overrides: Sequence[str]) -> list[str]:
    """Let `env.id=X` without `env=` start from the defaults instead of from those of another environment."""
    names = {text.partition("=")[0] for text in overrides}
    return ["env=any", *overrides] if "env.id" in names and not {"env", "experiment"} & names else list(overrides)


@functools.cache
def register(name: str, schema: type) -> None:
    """Register a schema with Hydra, once per process."""
    _store_schema(f"{name}_schema", schema, schema)


def _store_schema(name: str, schema: type, settings: Any) -> None:
    """Store a schema, or an object of it, whose values are then the defaults. Free settings may have any keys."""
    node = OmegaConf.structured(settings)
    for setting in Vocabulary(name, schema).settings.values():
        if setting.is_free:
            OmegaConf.set_struct(OmegaConf.select(node, setting.key), False)
    ConfigStore.instance().store(name=name, node=node)


def _to_resume_or_start(vocabulary: Vocabulary, overrides: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the configuration to compose, and the overrides to compose it with.

    If they name the directory of an existing run, they change that run's own settings instead of the defaults. The line
    that started a run has to resume it, too, so a key that it removes may be gone already.
    """
    run = _last_value(RUN_DIR, overrides) if vocabulary.resumes else ""
    if run and is_run(Path(run)):
        return _resumed(vocabulary, Path(run)), [each for each in overrides if not each.startswith("~")]
    return vocabulary.command, neutral_if_own_env(overrides)


def _resumed(vocabulary: Vocabulary, run: Path) -> str:
    """Store a configuration like that of the command, with the run's settings and no preset; return its name."""
    name, schema = f"{vocabulary.command}_resumed", f"{vocabulary.command}_schema"
    settings: LearnerConfig = RunDirectory(run).settings_to_resume(vocabulary.schema)
    _store_schema(f"{name}_schema", vocabulary.schema, settings)
    content = OmegaConf.load(conf_directory() / f"{vocabulary.command}.yaml")
    assert isinstance(content, DictConfig)
    content["defaults"] = [_without_preset(entry, schema, f"{name}_schema") for entry in content["defaults"]]
    ConfigStore.instance().store(name=name, node=content)
    return name


def _without_preset(entry: Any, schema: str, resumed: str) -> Any:
    """Return an entry of a defaults list that chooses no preset; arguments may still choose one."""
    if isinstance(entry, str):
        return resumed if entry == schema else entry
    [(group, choice)] = entry.items()
    return {group: choice if group.startswith("override ") else None}


def _last_value(key: str, overrides: Sequence[str]) -> str:
    """Return the value that a setting is given last; empty if there is none, or several to sweep over."""
    given = [each for each in overrides if each.startswith(f"{key}=")]
    found = OverridesParser.create().parse_override(given[-1]) if given else None
    return "" if found is None or found.is_sweep_override() else str(found.value())


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
