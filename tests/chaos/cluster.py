"""A learner and some actors as real processes on counting environments, each actor behind a bad network of its own.

Knows how to start, disturb and look at them; not when, nor what to make of it.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.counting import MODULE, SIGNATURE, WRAPPER, mock_options
from tests.chaos.proxy import Proxy
from tests.integration.processes import Commands, Process, checkpoints_of
from tests.integration.waiting import free_address, is_listening

ROOT = Path(__file__).parents[2]
ANSWER_SECONDS = 0.5  # for metrics, on this machine
START_SECONDS = 60.0
STOP_SECONDS = 25.0

WRONG_ACTION = re.compile("a (wrong|doubled|missing) action|missing actions")  # as counting environments complain

Numbers = dict[str, float]  # metrics by name and label, as exported


@dataclass(frozen=True, slots=True)
class Setup:
    """The processes that run. The learner is the limit: its updates take `update_seconds`, without a processor."""

    actors: int = 4
    envs: int = 16  # of each actor, in two groups
    spare: int = 2  # actors that there are slots for besides: dead sessions may hold theirs for ten seconds
    size: int = SIGNATURE  # entries of an observation; from 512 on they go through shared memory
    step_seconds: float = 0.002  # of a group
    unroll_length: int = 8
    batch_size: int = 8
    update_seconds: float = 0.03
    checkpoint_seconds: float = 1.0
    seed: int = 1


class Progress(NamedTuple):
    """The progress of an actor process."""

    sessions: float
    answered: float  # requests


class Resources(NamedTuple):
    """The memory, files and threads that a process holds."""

    rss: int  # bytes
    descriptors: int
    threads: int
    cpu_seconds: float


class Cluster:
    """Owned by one thread. `exits` are processes that ended though nobody had asked them to."""

    def __init__(self, directory: Path, setup: Setup, **environment: str) -> None:
        self.setup = setup
        self._environment = {"PYTHONUNBUFFERED": "1", **environment}  # last words are not lost in a kill
        self.run_dir = directory / "run"
        self.violations_file = directory / "violations.jsonl"
        self.address, self._metrics = free_address(), free_address()
        self._actor_metrics = [free_address() for _ in range(setup.actors)]
        self._commands = Commands(directory)
        self.proxies = [Proxy(self.address) for _ in range(setup.actors)]
        self.actors: list[Process] = []
        self.exits: list[str] = []
        self.learner_starts = 0
        self.learner = self.start_learner()
        self.actors = [self.start_actor(number) for number in range(setup.actors)]

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: Any) -> None:
        self._commands.close()
        for proxy in self.proxies:
            proxy.close()

    # Starting and disturbing.

    def start_learner(self) -> Process:
        self.learner_starts += 1
        self.learner = self._commands.start("learner", *self._learner_settings(), path=ROOT, **self._environment)
        return self.learner

    def start_actor(self, number: int) -> Process:
        settings = (
            f"learner={self.proxies[number].address}",
            f"modules=[{MODULE}]",
            f"name=actor-{number}",
            f"metrics={self._actor_metrics[number]}",
        )
        return self._commands.start("actor", *settings, path=ROOT, **self._environment)

    def restart_actor(self, number: int, with_signal: int) -> None:
        """Ends an actor by a signal and starts another in its place."""
        actor = self.actors[number]
        self._look_at(f"actor-{number}", actor)
        actor.signal(with_signal)
        actor.signal(signal.SIGCONT)  # it may be stopped
        actor.wait(STOP_SECONDS)
        self.actors[number] = self.start_actor(number)

    def restart_learner(self) -> None:
        self._look_at("learner", self.learner)
        self.learner.signal(signal.SIGKILL)
        self.learner.wait(STOP_SECONDS)
        self.start_learner()

    def stop(self) -> list[str]:
        """Ends everything in order; what did not end as it should."""
        self.look_for_exits()
        wrong = [_ended("learner", self.learner, signal.SIGTERM, codes=(0,))]
        wrong += [_ended(f"actor-{number}", actor, signal.SIGTERM, (0,)) for number, actor in enumerate(self.actors)]
        return [words for words in wrong if words]

    def look_for_exits(self) -> bool:
        """Notes processes that are gone and should not be; whether there are any."""
        for name, process in self._named():
            self._look_at(name, process)
        return bool(self.exits)

    def _look_at(self, name: str, process: Process) -> None:
        if not process.is_running:
            self.exits.append(f"{name} ended by itself with code {process.wait()}: {_last_words(process)}")

    def _named(self) -> Iterator[tuple[str, Process]]:
        yield "learner", self.learner
        yield from ((f"actor-{number}", actor) for number, actor in enumerate(self.actors))

    def _learner_settings(self) -> tuple[str, ...]:
        where = (f"run_dir={self.run_dir}", f"listen={self.address}", f"metrics={self._metrics}")
        return (*learner_settings(self.setup, self.violations_file), *where)

    # Looking.

    def is_open(self) -> bool:
        """Return whether the learner's port is open."""
        return is_listening(self.address)

    def learner_numbers(self) -> Numbers:
        """The learner's metrics; empty while it does not answer."""
        return scrape(self._metrics)

    def progress(self, number: int) -> Progress | None:
        """None while the actor does not answer."""
        numbers = scrape(self._actor_metrics[number])
        if not numbers:
            return None
        return Progress(numbers["seedrl_actor_sessions_total"], numbers["seedrl_actor_round_trip_seconds_count"])

    def all_stream(self) -> bool:
        """Return whether every actor has had answers and the learner has trained. Fails if a process is gone."""
        assert not self.look_for_exits(), self.exits
        progress = [self.progress(number) for number in range(self.setup.actors)]
        return all(each is not None and each.answered > 0 for each in progress) and self.updates() > 0

    def updates(self) -> float:
        """Return the updates of the learner that runs; 0 while it does not answer."""
        return self.learner_numbers().get("seedrl_updates_total", 0.0)

    def violations(self) -> list[str]:
        """Return what the model found wrong with unrolls, and what environments found wrong with actions."""
        found = self.violations_file.read_text().splitlines() if self.violations_file.exists() else []
        for path in self._commands.directory.glob("*.txt"):  # an actor may have gone on after that
            found += [line for line in path.read_text(errors="replace").splitlines() if WRONG_ACTION.search(line)]
        return found

    def checkpoint(self) -> dict[str, Any]:
        """The state of the newest checkpoint; empty before there is one."""
        for path in reversed(checkpoints_of(self.run_dir)):
            with contextlib.suppress(OSError):  # it has just been replaced by a newer one
                state: dict[str, Any] = json.loads((path / "state.json").read_text())
                return state
        return {}


def _hydra(options: dict[str, Any]) -> str:
    """Return plain options as an override of Hydra's has them."""
    return "{" + ", ".join(f"{name}: {value}" for name, value in options.items()) + "}"


def learner_settings(setup: Setup, violations: Path) -> tuple[str, ...]:
    """Return the settings of a learner on counting environments, without its addresses."""
    model = f"{{violations: '{violations}', update_seconds: {setup.update_seconds}}}"
    return (
        *(
            "env=any",
            "env.id=mock",
            f"env.wrappers=[{WRAPPER}]",
            "model.name=tests.chaos.model:CountingModel",
            f"model.options={model}",
        ),
        f"env.options={_hydra(mock_options(setup.size, step_seconds=setup.step_seconds))}",
        *("algorithm=impala", f"algorithm.unroll_length={setup.unroll_length}"),
        f"algorithm.batch_size={setup.batch_size}",
        *(f"actors.envs={setup.envs}", "actors.groups=2"),
        f"serving.max_slots={(setup.actors + setup.spare) * setup.envs}",
        f"checkpoint.seconds={setup.checkpoint_seconds}",
        *("stop.env_steps=1_000_000_000", "threads=1", "display=plain", f"seed={setup.seed}"),
        "serving.max_observation=inf",  # signatures are any integers
    )


def scrape(address: str) -> Numbers:
    """Return what is shown at an address; empty if there is no answer in time."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=ANSWER_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
    except (OSError, ValueError):
        return {}
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def resources(pid: int) -> Resources:
    """Return what a process that exists uses."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return Resources(
        rss=int(fields["VmRSS"].split()[0]) * 1024,
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(fields["Threads"]),
        cpu_seconds=(int(user) + int(system)) / os.sysconf("SC_CLK_TCK"),
    )


def wait_until(condition: Callable[[], Any], what: str, seconds: float = START_SECONDS, pause: float = 0.02) -> float:
    """Return how long it took; fail with `what` if it does not happen."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds:g} s"
        time.sleep(pause)
    return time.monotonic() - began


def keep_logs(directory: Path, out: Path) -> None:
    """Copies what the processes said."""
    out.mkdir(parents=True, exist_ok=True)
    for path in [*directory.glob("*.txt"), *directory.glob("*.jsonl")]:
        shutil.copy(path, out)


def _ended(name: str, process: Process, number: int, codes: tuple[int, ...]) -> str:
    """Ends a process by a signal; what is wrong with how it ended, empty for nothing."""
    if process.is_running:
        process.signal(signal.SIGCONT)
        process.signal(number)
    try:
        code = process.wait(STOP_SECONDS)
    except AssertionError:
        return f"{name} did not end within {STOP_SECONDS:g} s"
    return "" if code in codes else f"{name} ended with code {code}: {_last_words(process)}"


def _last_words(process: Process) -> str:
    lines = (process.out + process.err).strip().splitlines()
    return lines[-1] if lines else "it said nothing"
