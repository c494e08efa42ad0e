"""The commands of `seedrl`: what each is for, its settings and the function that runs it.

Each command imports what it needs when it runs, so that help and tab completion answer at once: this module imports
neither Hydra nor numpy, torch, grpc or envpool. `commandline/main.py` reads the line that names a command.
"""

import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from seedrl.commandline.command import RUN_DIR, Command
from seedrl.commandline.exits import errors_as_exit_codes
from seedrl.commandline.extras import refuse_without
from seedrl.config import (
    ActorConfig,
    BenchConfig,
    CardConfig,
    CertsConfig,
    CheckConfig,
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
    SweptRunConfig,
)
from seedrl.errors import ConfigError
from seedrl.run.identity import identity

TrainedConfig = TypeVar("TrainedConfig", EvalConfig, ServeConfig, ExportConfig, RecordConfig, CardConfig)


def _run(config: RunConfig, overrides: Sequence[str]) -> None:
    from seedrl.launching.engines import launch_job

    refuse_without("torch", "run")
    if swept := [each for each in overrides if each.startswith("sweep.")]:
        raise ConfigError(f"{swept[0]} is for sweeps: give -m as well")
    launch_job(config, overrides)


def _render(config: RenderConfig) -> None:
    from seedrl.launching.render import run_render

    run_render(config)


def _learner(config: LearnerConfig) -> None:
    from seedrl.launching.children import end_with_parent
    from seedrl.launching.torchrun import is_under_torchrun
    from seedrl.ranks.settings import settings_of_rank
    from seedrl.run.directory import check_initial_weights
    from seedrl.validation import check
    from seedrl.wire.address import refuse_if_taken

    who = identity("learner")
    if is_under_torchrun():
        end_with_parent()
    refuse_without("torch", "learner")
    check(config)  # before torch is imported: that takes seconds
    check_initial_weights(config)
    config = settings_of_rank(config, who)
    refuse_if_taken(config.listen or config.socket)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback meanwhile
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our own messages report what matters
    from seedrl.roles.learner import run_learner

    if who.world_size == 1:
        run_learner(config, who)
        return
    from seedrl.ranks.ending import ending_at_once

    with ending_at_once(), errors_as_exit_codes("learner"):
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
    from seedrl.wire.address import refuse_if_taken

    refuse_without("torch", "serve")
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


def _bench_files(verb: str, files: Sequence[str]) -> int:
    return int(_bench_module().with_files(verb, files))


def _bench_module() -> Any:
    try:
        import bench.main
    except ModuleNotFoundError as error:
        raise ConfigError(f"seedrl bench needs a checkout with everything installed: make bench ({error})") from error
    return bench.main


def _observe(config: ObserveConfig) -> None:
    from seedrl.commandline.settings import conf_directory
    from seedrl.monitoring.observe import run_observe

    run_observe(config, conf_directory() / "observability")


def _plot(config: PlotConfig) -> None:
    from seedrl.monitoring.compare import run_plot

    run_plot(config)


def _status(config: StatusConfig) -> None:
    from seedrl.monitoring.overview import run_status

    run_status(config)


def _check(config: CheckConfig) -> None:
    from seedrl.roles.check import run_check

    run_check(config)


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
    from seedrl.run.finding import find_run

    run = str(find_run(config.run, must_be_trained=True))
    if run != config.run:
        print(f"newest run: {run}", file=sys.stderr)
    return dataclasses.replace(config, run=run)


def _certs(config: CertsConfig) -> None:
    from seedrl.wire.certificates import run_certs

    run_certs(config)


COMMANDS = {
    "run": Command(
        "train: start a learner and its actors",
        SweptRunConfig,
        _run,
        run=RUN_DIR,
        takes_overrides=True,
        is_lasting=True,
        examples=(
            "run env=cartpole                          a preset; --help all lists them",
            "run env.id=Acrobot-v1 stop.env_steps=3e5  any environment of envpool, with neutral settings",
            "run env.id=gymnasium:CartPole-v1          Gymnasium's; env.id=my_module:make is your own",
            "run runs/CartPole-v1/20260101-120000      resume a run with its own settings",
            "run -m env=cartpole seed=1,2,3            several runs, with a table and a plot at the end",
        ),
        often=(
            "env.id",
            "stop.env_steps",
            "seed",
            "algorithm.name",
            "algorithm.learning_rate",
            "algorithm.batch_size",
            "algorithm.unroll_length",
            "actors.count",
            "actors.envs",
            "model.lstm",
        ),
    ),
    "learner": Command(
        "run only the learner; actors may connect from any machine",
        LearnerConfig,
        _learner,
        run=RUN_DIR,
        is_lasting=True,
        examples=(
            "learner env=pong                         for actors on this machine",
            "learner env=pong listen=10.0.0.1:50051   for others, with security.*: docs/security.md",
            "learner env=own                          actors bring the environment",
        ),
        often=(
            "env.id",
            "listen",
            "stop.env_steps",
            "run_dir",
            "seed",
            "algorithm.name",
            "algorithm.learning_rate",
            "algorithm.batch_size",
            "actors.envs",
            "device",
        ),
    ),
    "actor": Command(
        "run an actor for a learner",
        ActorConfig,
        _actor,
        is_lasting=True,
        examples=("actor learner=127.0.0.1:50051", "actor learner=unix:/tmp/learner.sock threads=4"),
        often=(
            "learner",
            "name",
            "threads",
            "patience",
            "modules",
            "metrics",
            "security.ca_file",
            "security.token_file",
        ),
    ),
    "render": Command(
        "write a job as Kubernetes manifests",
        RenderConfig,
        _render,
        examples=(
            "render out=manifests env=pong",
            "render out=manifests env=pong ranks.count=2 actors.count=16 actors.at_most=64",
        ),
        often=(
            "out",
            "env.id",
            "stop.env_steps",
            "ranks.count",
            "actors.count",
            "actors.at_most",
            "launch.image",
            "launch.namespace",
            "launch.storage_gb",
            "launch.learner.gpus",
        ),
    ),
    "eval": Command("evaluate the policy of a run on whole episodes", EvalConfig, _eval, run="run"),
    "serve": Command(
        "serve the policy of a run to clients that ask for actions",
        ServeConfig,
        _serve,
        run="run",
        is_lasting=True,
        often=("run", "checkpoint", "listen", "greedy", "watch", "envs", "max_slots", "metrics", "device"),
    ),
    "control": Command(
        "pause, resume, reset, drain or move running actors, or change how they explore",
        ControlConfig,
        _control,
        run="run",
        words="do",
        examples=("control pause", "control resume", "control drain actor=actor-3", "control epsilon=0.1"),
        often=("do", "actor", "rank", "temperature", "epsilon", "options", "learner", "run", "json"),
    ),
    "status": Command(
        "show a running learner, its actors and what limits them",
        StatusConfig,
        _status,
        run="run",
        examples=("status", "status --json", "status learner=10.0.0.1:50051 security.ca_file=certs/ca.pem"),
        often=("learner", "run", "rank", "actor", "top", "json", "security.ca_file", "security.token_file"),
    ),
    "doctor": Command(
        "check a run before it starts, or find the bottleneck of a running one",
        DoctorConfig,
        _doctor,
        run="run",
        examples=("doctor env=pong listen=127.0.0.1:50051", "doctor run=runs/Pong-v5/20260101-120000"),
        often=("run", "learner", "env.id", "listen", "actors.count", "actors.envs", "launch.engine", "device"),
    ),
    "check": Command(
        "examine an environment, or a model of your own: seedrl check env.id=X",
        CheckConfig,
        _check,
        examples=("check env.id=my_module:make", "check env=pong", "check env=cartpole model.name=my_models:Linear"),
        often=("env.id", "env.options", "env.wrappers", "model.name", "algorithm.name", "steps", "json"),
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
        on_files=_bench_files,
        verbs=(
            ("compare", "A.json B.json", "show what got better or worse beyond noise; exit code 1 if worse"),
            ("guard", "HISTORY.jsonl FILE.json", "compare with earlier nights on this machine; added unless worse"),
            ("render", "FILE.json [RESULTS.md]", "plot the results, and write a page with all of them"),
        ),
    ),
    "plot": Command(
        "plot several runs; seeds of the same settings share a line",
        PlotConfig,
        _plot,
        words="runs",
        examples=(
            "plot runs",
            "plot runs/Pong-v5 runs/Breakout-v5 out=atari.svg",
            "plot runs/Breakout-v5 references.CleanRL=415",
        ),
    ),
}
