"""Fixtures that start learners and actors in threads and end them after each test, whatever happened in it."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from seedrl.config import ActorConfig
from seedrl.roles.learner import LearnerProcess
from tests.integration.support import RunningActor, RunningLearner, SignedPool, ended_together, tiny_config
from tests.integration.waiting import free_address

StartLearner = Callable[..., RunningLearner]
StartActor = Callable[..., RunningActor]


@pytest.fixture
def start_learner(tmp_path: Path) -> Iterator[StartLearner]:
    """start_learner(kind=LearnerProcess, listen=…, **{"serving.max_slots": 4, …})"""
    started: list[RunningLearner]
    with ended_together() as started:

        def start(kind: type[LearnerProcess] = LearnerProcess, listen: str = "", **settings: Any) -> RunningLearner:
            config = tiny_config(str(tmp_path / "run"), listen or free_address())
            for key, value in settings.items():
                group, _, name = key.rpartition("__")
                setattr(getattr(config, group) if group else config, name, value)
            started.append(RunningLearner(config, kind))
            return started[-1].opened()

        yield start


@pytest.fixture
def start_actor() -> Iterator[StartActor]:
    """start_actor(address, make_pool=SignedPool, **fields of ActorConfig)"""
    started: list[RunningActor]
    with ended_together() as started:

        def start(address: str, make_pool: Callable[..., Any] = SignedPool, **settings: Any) -> RunningActor:
            config = ActorConfig(**{"learner": address, "name": f"actor-{len(started)}", "patience": 60.0, **settings})
            started.append(RunningActor(config, make_pool))
            return started[-1]

        yield start


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of its own, of two megabytes."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a file system can be mounted by root only; test_checkpoint.py has the same with a limit instead")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)
