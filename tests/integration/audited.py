"""Trains, checkpoints and resumes in one process; records which modules unpickle or run code: `… RUN_DIR FOUND.json`.

Python raises an audit event for every class that is unpickled, every unmarshalling and every run of code. An import
causes the last two for an installed file; modules that run other code during an import are recorded separately.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import torch

from envs_server.actor import Actor
from seedrl.config import LearnerConfig
from tests.builders import one_step
from tests.integration.support import InThread, RunningLearner
from tests.integration.waiting import free_address

EVENTS = ("pickle.find_class", "marshal.load", "marshal.loads", "exec", "compile", "code.__new__")
INSTALLED = ("<frozen", str(Path(json.__file__).parents[1]), str(Path(torch.__file__).parents[1]))
INSTALLED += (str(Path(__file__).parents[2]),)


def modules_of(frame: FrameType | None) -> Iterator[str]:
    """Yield the module of a frame, of its caller, and so on."""
    while frame is not None:
        yield str(frame.f_globals.get("__name__"))
        frame = frame.f_back


def is_installed(code: object) -> bool:
    return isinstance(code, CodeType) and code.co_filename.startswith(INSTALLED)


def train(run_dir: str, env_steps: int) -> int:
    """Train until `env_steps`; return the number of updates since the run began."""
    config = LearnerConfig(run_dir=run_dir, listen=free_address(), threads=1, metrics="127.0.0.1:0")
    config.algorithm = one_step(unroll_length=5, batch_size=4)
    config.actors.envs, config.serving.max_slots = 8, 16
    config.stop.env_steps, config.checkpoint.seconds = env_steps, 0.0
    config.display = type(config.display).none
    learner = RunningLearner(config).opened()
    InThread(Actor(config.listen, say=lambda _: None).run).join()
    updates: int = learner.join()["updates"]
    return updates


def main(run_dir: str, out: str) -> None:
    found: dict[str, set[str]] = {event: set() for event in EVENTS}
    elsewhere: set[str] = set()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event not in found:
            return
        names = list(modules_of(sys._getframe(1)))
        if "importlib._bootstrap" not in names:
            found[event].add(names[0])
        elif event == "exec" and not is_installed(arguments[0]):
            elsewhere.add(names[0])

    sys.addaudithook(hook)
    updates = [train(run_dir, 300), train(run_dir, 600)]
    callers = {event: sorted(names) for event, names in found.items()}
    Path(out).write_text(json.dumps({"updates": updates, "callers": callers, "while importing": sorted(elsewhere)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
