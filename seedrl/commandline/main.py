"""Runs a command line: `seedrl COMMAND key=value …`. The only module of this package that knows the commands."""

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from seedrl.commandline.command import RUN_DIR
from seedrl.commandline.completion import run_completion
from seedrl.commandline.exits import errors_as_exit_codes
from seedrl.commandline.extras import refuse_without
from seedrl.commandline.help import every_setting, first_screen, overview
from seedrl.commandline.line import ALL, HELP, VERSION, Line, read
from seedrl.commandline.output import patient_output
from seedrl.commandline.settings import Vocabulary
from seedrl.commandline.suggestions import did_you_mean
from seedrl.commands import COMMANDS
from seedrl.errors import ConfigError
from seedrl.version import __version__


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `seedrl` with these arguments, or with those of the process."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if "" not in sys.path:  # as with python -m: modules of the working directory can be named in settings
        sys.path.insert(0, "")
    name = next((word for word in arguments if not word.startswith("-")), "")
    if name == "help":
        arguments = [word for word in arguments if word != name] + [HELP[0]]
        name = next((word for word in arguments if not word.startswith("-")), "")
    rest = [word for number, word in enumerate(arguments) if number != (arguments.index(name) if name else -1)]
    if not name:
        with patient_output():
            print(f"seedrl {__version__}" if set(VERSION) & set(rest) else overview(COMMANDS))
    elif name == "completion":
        with patient_output(), errors_as_exit_codes(name):
            run_completion(COMMANDS, rest)
    elif name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, "seedrl {}") or f"; the commands are {', '.join(COMMANDS)}"
        sys.exit(f"seedrl: there is no command {name}{hint}")
    else:
        execute(name, rest)


def execute(name: str, arguments: Sequence[str]) -> None:
    """Read the arguments of a command, and run it or answer what they ask."""
    command = COMMANDS[name]
    if command.on_files and arguments and arguments[0] in (verb for verb, _, _ in command.verbs):
        with errors_as_exit_codes(name):
            raise SystemExit(command.on_files(arguments[0], arguments[1:]))
    with errors_as_exit_codes(name):
        line = read(command, vocabulary(name), arguments)
    if line.is_question:
        with patient_output(), errors_as_exit_codes(name):
            print(_answer(name, line))
        return
    with patient_output(name if command.is_lasting else ""), errors_as_exit_codes(name):
        if line.hydras or line.shows or _has_launcher(line):
            _leave_to_hydra(name, line)
        elif line.is_sweep:
            _sweep(name, line)
        else:
            _start(name, compose(name, line.overrides), line.overrides)


def _answer(name: str, line: Line) -> str:
    """Return what a line asks for that runs nothing."""
    if line.asks_version:
        return f"seedrl {__version__}"
    if line.help is not None:
        return help_text(name, line)
    from seedrl.commandline.composing import as_yaml

    return as_yaml(vocabulary(name), line.overrides)


def _has_launcher(line: Line) -> bool:
    return line.is_sweep and any(override.startswith("hydra/launcher=") for override in line.overrides)


def _sweep(name: str, line: Line) -> NoReturn:
    """Run many runs, and exit with a code that tells whether all of them succeeded."""
    from seedrl.commandline.checking import checked
    from seedrl.commandline.population import Population, check_population, constant_schedules
    from seedrl.commandline.search import check_values, search_of, split
    from seedrl.commandline.sweep import Sweep, places, sweep_directory
    from seedrl.launching.engines import check_launch

    if name != "run":
        raise ConfigError(f"only seedrl run has sweeps, not seedrl {name}")
    refuse_without("torch", name)
    fixed, varied = split(checked(vocabulary(name), line.overrides, is_sweep=True))
    config = compose(name, fixed)
    if config.run_dir:
        raise ConfigError(f"run_dir={config.run_dir} is the directory of one run; that of a sweep is sweep.dir")
    is_population = bool(config.sweep.population)
    if is_population:
        fixed += constant_schedules(fixed)
        check_population(config, varied)
    else:
        check_values(config.sweep.trials, varied)
    if config.sweep.trials:
        refuse_without("optuna", name)
    cores = places(config.sweep)
    directory = sweep_directory(config.sweep)
    make_search = Population if is_population else search_of
    search = make_search(config, vocabulary(name), varied, directory)
    of_a_run = [each for each in fixed if not each.startswith("sweep.")]
    sweep = Sweep(directory, cores, of_a_run, search, lambda words: check_launch(compose(name, words), words))
    raise SystemExit(sweep.run())


def _start(name: str, config: Any, overrides: Sequence[str]) -> None:
    command = COMMANDS[name]
    command.start(config, overrides) if command.takes_overrides else command.start(config)


def vocabulary(name: str) -> Vocabulary:
    """Return the words that a command knows."""
    return Vocabulary(name, COMMANDS[name].schema, resumes=COMMANDS[name].run == RUN_DIR)


def compose(name: str, overrides: Sequence[str]) -> Any:
    """Return the settings that a command would have, without running it."""
    from seedrl.commandline.composing import compose

    return compose(vocabulary(name), overrides)


def help_text(name: str, line: Line) -> str:
    """Return the help of a command: one screen, or everything."""
    if line.help == ALL:
        return every_setting(COMMANDS[name], vocabulary(name))
    from seedrl.commandline.composing import preview

    return first_screen(COMMANDS[name], vocabulary(name), preview(vocabulary(name), line.overrides))


def register_schemas() -> None:
    """Register the settings of every command with Hydra."""
    from seedrl.commandline.composing import register

    for name, command in COMMANDS.items():
        register(name, command.schema)


def _leave_to_hydra(name: str, line: Line) -> None:
    """Let Hydra itself carry out a line that has options or a launcher of its own."""
    from seedrl.commandline.composing import run_by_hydra

    def task(config: Any, overrides: Sequence[str]) -> None:
        with errors_as_exit_codes(name):  # also in a process that a launcher of Hydra starts
            _start(name, config, overrides)

    run_by_hydra(vocabulary(name), line, task)
