"""The command line: `seedrl COMMAND key=value …`. Only this module uses Hydra; all others get plain dataclasses.

Starts without importing torch, grpc or envpool: each command imports what it needs when it runs.
"""

import dataclasses
import functools
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from seedrl.config import (
    ActorConfig,
    BenchConfig,
    CardConfig,
    CertsConfig,
    ControlConfig,
    DoctorConfig,
    EvalConfig,
    ExportConfig,
    LearnerConfig,
    ObserveConfig,
    PlotConfig,
    RecordConfig,
    RenderConfig,
    RunConfig,
    ServeConfig,
    StatusConfig,
)
from seedrl.errors import ConfigError, SeedrlError
from seedrl.launching.children import end_with_parent
from seedrl.launching.engines import launch_job
from seedrl.launching.torchrun import is_under_torchrun, write_error_file
from seedrl.ranks.settings import settings_of_rank
from seedrl.run.directory import RunDirectory
from seedrl.run.finding import find_run, is_run
from seedrl.run.identity import identity
from seedrl.run.words import RUN_DIR, words_as_settings
from seedrl.validation import check
from seedrl.version import __version__
from seedrl.wire.address import refuse_if_taken

TrainedConfig = TypeVar("TrainedConfig", EvalConfig, ServeConfig, ExportConfig, RecordConfig, CardConfig)


def _run(config: RunConfig) -> None:
    launch_job(config, HydraConfig.get().overrides.task)


def _render(config: RenderConfig) -> None:
    from seedrl.launching.render import run_render

    run_render(config)


def _learner(config: LearnerConfig) -> None:
    who = identity("learner")
    if is_under_torchrun():
        end_with_parent()
    check(config)  # before torch is imported: that takes seconds
    config = settings_of_rank(config, who)
    refuse_if_taken(config.listen or config.socket)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback meanwhile
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our own messages report what matters
    from seedrl.roles.learner import run_learner

    if who.world_size == 1:
        run_learner(config, who)
        return
    from seedrl.ranks.ending import ending_at_once

    with ending_at_once(), _errors_as_exit_codes("learner"):
        run_learner(config, who)


def _actor(config: ActorConfig) -> None:
    from envs_server.main import run_actor

    run_actor(config)


def _eval(config: EvalConfig) -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    signal.signal(signal.SIGINT, lambda number, _: sys.exit(128 + number))  # no traceback
    from seedrl.roles.evaluate import run_eval

    run_eval(_with_trained_run(config))


def _serve(config: ServeConfig) -> None:
    refuse_if_taken(config.listen)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback meanwhile
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from seedrl.roles.serve import run_serve

    run_serve(_with_trained_run(config))


def _control(config: ControlConfig) -> None:
    from seedrl.monitoring.control import run_control

    run_control(config)


def _bench(config: BenchConfig) -> None:
    _bench_module().run_bench(config)


def _bench_module() -> Any:
    try:
        import bench.main
    except ModuleNotFoundError as error:
        raise ConfigError(f"seedrl bench needs a checkout with everything installed: make bench ({error})") from error
    return bench.main


def _observe(config: ObserveConfig) -> None:
    from seedrl.monitoring.observe import run_observe

    run_observe(config, conf_directory() / "observability")


def _plot(config: PlotConfig) -> None:
    from seedrl.monitoring.compare import run_plot

    run_plot(config)


def _status(config: StatusConfig) -> None:
    from seedrl.monitoring.overview import run_status

    run_status(config)


def _doctor(config: DoctorConfig) -> None:
    from seedrl.monitoring.doctor import run_doctor

    run_doctor(config)


def _export(config: ExportConfig) -> None:
    from seedrl.trained.export import run_export

    run_export(_with_trained_run(config))


def _record(config: RecordConfig) -> None:
    from seedrl.trained.record import run_record

    run_record(_with_trained_run(config))


def _card(config: CardConfig) -> None:
    from seedrl.trained.card import run_card

    run_card(_with_trained_run(config))


def _with_trained_run(config: TrainedConfig) -> TrainedConfig:
    """Return the settings with the newest run that has a checkpoint, if they name no run."""
    run = str(find_run(config.run, must_be_trained=True))
    if run != config.run:
        print(f"newest run: {run}", file=sys.stderr)
    return dataclasses.replace(config, run=run)


def _certs(config: CertsConfig) -> None:
    try:
        from seedrl.wire.certificates import run_certs
    except ModuleNotFoundError as error:
        raise ConfigError(f"seedrl certs needs one more package: pip install 'seedrl[certs]' ({error})") from error
    run_certs(config)


@dataclass(frozen=True)
class Command:
    """A command of `seedrl`: its line of help, its settings, and the function that runs it."""

    meaning: str
    schema: type
    start: Callable[[Any], None]
    verbs: tuple[tuple[str, str, str], ...] = ()  # subcommands on files: the word, its arguments, its line of help
    words: str = ""  # the setting that arguments without a key go into, such as orders
    run: str = ""  # the setting that a run without a key goes into


COMMANDS = {
    "run": Command("train: start a learner and its actors; seedrl run RUN resumes", RunConfig, _run, run=RUN_DIR),
    "learner": Command(
        "run only the learner; actors may connect from any machine", LearnerConfig, _learner, run=RUN_DIR
    ),
    "actor": Command("run an actor for a learner: seedrl actor learner=HOST:PORT", ActorConfig, _actor),
    "render": Command("write a job as Kubernetes manifests: seedrl render out=DIR", RenderConfig, _render),
    "eval": Command("evaluate the policy of a run on whole episodes", EvalConfig, _eval, run="run"),
    "serve": Command("serve the policy of a run to clients that ask for actions", ServeConfig, _serve, run="run"),
    "control": Command(
        "steer running actors: pause, resume, reset, drain, move, open, temperature=, epsilon=, options=",
        ControlConfig,
        _control,
        words="do",
        run="run",
    ),
    "status": Command("show a running learner, its actors and what limits them", StatusConfig, _status, run="run"),
    "doctor": Command(
        "check a run before it starts, or find the bottleneck of a running one", DoctorConfig, _doctor, run="run"
    ),
    "export": Command(
        "export a trained policy as one file for torch or ONNX, and check it", ExportConfig, _export, run="run"
    ),
    "record": Command(
        "record a trained policy as mp4, GIF and a picture of its frames", RecordConfig, _record, run="run"
    ),
    "card": Command("write a one-page description of a run, or upload it", CardConfig, _card, run="run"),
    "certs": Command("make a development CA, certificates and a token for two machines", CertsConfig, _certs),
    "observe": Command("start a Prometheus that watches learners: graphs, history, alerts", ObserveConfig, _observe),
    "bench": Command(
        "measure each hop of an observation against the fastest that is possible",
        BenchConfig,
        _bench,
        verbs=(
            (
                "compare",
                "A.json B.json",
                "show what got better or worse beyond noise; exit code 1 if worse",
            ),
            ("render", "FILE.json [RESULTS.md]", "plot the results, and write a page with all of them"),
        ),
    ),
    "plot": Command(
        "plot several runs: seedrl plot RUN …; seeds of the same settings share a line",
        PlotConfig,
        _plot,
        words="runs",
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "" not in sys.path:  # as with python -m: modules of the working directory can be named in settings
        sys.path.insert(0, "")
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("--help", "-h", "help"):
        print(_overview())
    elif name == "--version":
        print(f"seedrl {__version__}")
    elif name not in COMMANDS:
        sys.exit(f"seedrl: there is no command {name!r}; the commands are {', '.join(COMMANDS)}")
    else:
        execute(name, rest)


def execute(name: str, arguments: Sequence[str]) -> None:
    """Compose the command's settings from conf/ and overrides, and run it."""
    command = COMMANDS[name]
    register_schemas()
    if "--help" in arguments or "-h" in arguments:
        print(help_text(name))
        return
    if arguments and arguments[0] in (verb for verb, _, _ in command.verbs):
        with _errors_as_exit_codes(name):
            raise SystemExit(_bench_module().with_files(arguments[0], arguments[1:]))

    def task(settings: Any) -> None:
        with _errors_as_exit_codes(name):
            command.start(_complete(name, settings))

    with _errors_as_exit_codes(name):
        arguments = words_as_settings(arguments, command.words, command.run)
        config_name, arguments = _to_resume_or_start(name, _flags_as_settings(command, arguments))
    sys.argv = [f"seedrl {name}", *arguments]
    hydra.main(version_base="1.3", config_path=str(conf_directory()), config_name=config_name)(task)()


@contextmanager
def _errors_as_exit_codes(name: str) -> Iterator[None]:
    """End the process with one line and an exit code of its own for each of our errors."""
    try:
        yield
    except SeedrlError as error:
        print(f"seedrl {identity(name)}: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        write_error_file(str(error), error.exit_code)
        raise SystemExit(error.exit_code) from error


def _flags_as_settings(command: Command, arguments: Sequence[str]) -> list[str]:
    """Turn `--json` into json=true for every setting that is false by default."""
    flags = {f"--{key}": f"{key}=true" for key, default, _ in settings_of(command.schema) if default == "False"}
    return [flags.get(argument, argument) for argument in arguments]


def _neutral_if_own_env(arguments: Sequence[str]) -> list[str]:
    """Let `env.id=X` without `env=` start from the defaults instead of from those of another environment."""
    names = {argument.partition("=")[0] for argument in arguments}
    return ["env=any", *arguments] if "env.id" in names and not {"env", "experiment"} & names else list(arguments)


def compose(name: str, overrides: Sequence[str]) -> Any:
    """Return the settings that a command would have, without running it."""
    register_schemas()
    config_name, overrides = _to_resume_or_start(name, overrides)
    try:
        with hydra.initialize_config_dir(str(conf_directory()), version_base="1.3"):
            return _complete(name, hydra.compose(config_name, list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError("; ".join(line.strip() for line in str(error).splitlines() if line.strip())) from error


def _complete(name: str, settings: Any) -> Any:
    """Return composed settings as plain dataclasses; refuse those that lack one."""
    if missing := sorted(OmegaConf.missing_keys(settings)):
        raise ConfigError(f"{', '.join(missing)} must be given; seedrl {name} --help explains each")
    return OmegaConf.to_object(settings)


@functools.cache
def register_schemas() -> None:
    """Register the dataclasses with Hydra, once per process: they never change, and this takes 0.1 s.

    Keyword arguments of foreign constructors may have any keys.
    """
    for name, command in COMMANDS.items():
        _store_schema(f"{name}_schema", command.schema)


def _store_schema(name: str, settings: Any) -> None:
    """Store a dataclass, or an object of one, whose values are then the defaults."""
    schema = OmegaConf.structured(settings)
    for section in (*(schema.get(group) for group in ("env", "model", "algorithm", "store")), schema):
        for options in ("options", "callback_options"):
            if section is not None and options in section:
                OmegaConf.set_struct(section[options], False)
    ConfigStore.instance().store(name=name, node=schema)


def _to_resume_or_start(name: str, arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the configuration to compose, and the arguments to compose it with.

    If the arguments name the directory of an existing run, they change that run's own settings instead of the defaults.
    """
    if COMMANDS[name].run == RUN_DIR and (run := _last_value(RUN_DIR, arguments)) and is_run(Path(run)):
        return _resumed(name, Path(run)), _repeatable(arguments)
    return name, _neutral_if_own_env(arguments)


def _repeatable(arguments: Sequence[str]) -> list[str]:
    """Return arguments that fit whether or not they were given to the run before: a key may be there or gone already.

    The line of a run's start has to resume it, too, and a learner that crashed is started with the same line again.
    """
    return [re.sub(r"^\+(?!\+)", "++", argument) for argument in arguments if not argument.startswith("~")]


def _resumed(name: str, run: Path) -> str:
    """Store a configuration like that of the command, with the run's settings and no preset; return its name."""
    schema, resumed = f"{name}_schema", f"{name}_resumed"
    _store_schema(f"{resumed}_schema", RunDirectory(run).settings_to_resume(COMMANDS[name].schema))
    content = OmegaConf.load(conf_directory() / f"{name}.yaml")
    assert isinstance(content, DictConfig)
    content["defaults"] = [_without_preset(entry, schema, resumed) for entry in content["defaults"]]
    ConfigStore.instance().store(name=resumed, node=content)
    return resumed


def _without_preset(entry: Any, schema: str, resumed: str) -> Any:
    """Return an entry of a defaults list that chooses no preset; arguments may still choose one."""
    if isinstance(entry, str):
        return f"{resumed}_schema" if entry == schema else entry
    [(group, choice)] = entry.items()
    return {group: choice if group.startswith("override ") else None}


def _last_value(key: str, arguments: Sequence[str]) -> str:
    """Return the value that a setting is given last; empty if there is none, or several to sweep over."""
    given = [argument for argument in arguments if argument.startswith(f"{key}=")]
    try:
        found = OverridesParser.create().parse_override(given[-1]) if given else None
    except HydraException:  # Hydra reports it when the settings are composed
        return ""
    return "" if found is None or found.is_sweep_override() else str(found.value())


def conf_directory() -> Path:
    """Return conf/, which lies beside the package in a checkout and inside it in a wheel."""
    package = Path(__file__).parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def help_text(name: str) -> str:
    """Return the help of a command: every setting with its default and meaning."""
    command = COMMANDS[name]
    words = f"{command.words.upper()} … " if command.words else ""
    words += "[RUN] " if command.run else ""
    lines = [f"seedrl {name} {words}key=value …    {command.meaning}"]
    lines += [f"seedrl {name} {verb} {files}    {meaning}" for verb, files, meaning in command.verbs]
    lines.append("")
    for group in _groups(command.schema):
        choices = sorted(path.stem for path in group.glob("*.yaml"))
        if choices:
            lines.append(f"  {group.name}={'|'.join(choices)}")
    lines += ["", "Settings and their defaults (the choices above may set others):", ""]
    lines += [f"  {key:<30} {meaning}  [{default}]" for key, default, meaning in settings_of(command.schema)]
    lines += [
        "",
        "-m runs all combinations of comma-separated values; --cfg job shows the settings; --hydra-help shows more.",
    ]
    return "\n".join(lines)


def _groups(schema: type) -> list[Path]:
    """Return the directories of conf/ that hold choices for a command."""
    if not issubclass(schema, LearnerConfig):
        return []
    known = {field.name for field in dataclasses.fields(schema)} | {"experiment"}
    return sorted(path for path in conf_directory().iterdir() if path.is_dir() and path.name in known)


def settings_of(schema: type, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield key, default and meaning of every setting, depth first."""
    for field in dataclasses.fields(schema):
        assert field.default_factory is not dataclasses.MISSING
        default = field.default_factory()
        if dataclasses.is_dataclass(default):
            yield from settings_of(type(default), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", _shown(default), field.metadata["meaning"]


def _shown(default: Any) -> str:
    if default == "???":
        return "required"
    if default is None:
        return "null"
    return str(getattr(default, "name", default))


def _overview() -> str:
    lines = [f"seedrl {__version__}: central inference for reinforcement learning", ""]
    lines += [f"  seedrl {name:<8} {command.meaning}" for name, command in COMMANDS.items()]
    lines += ["", "seedrl COMMAND --help lists its settings. A first run: seedrl run env=cartpole"]
    return "\n".join(lines)
