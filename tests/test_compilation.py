"""Networks that torch compiles for training: refused in words where that cannot work, and in nobody's way elsewhere."""

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from seedrl.config import LearnerConfig, ModelConfig, RanksConfig
from seedrl.errors import ConfigError
from seedrl.models.compilation import compile_forward
from seedrl.validation import check
from tests.builders import learner_parts
from tests.fakes import TinyModel, make_spec

ROOT = Path(__file__).parents[1]


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what torch is asked to compile, and leave it as it is: a compiler takes long and leaves threads."""
    asked: list[Any] = []

    def compile(function: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[..., Any]:
        asked.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    return asked


def test_network_is_compiled_in_place_and_its_copies_are_not(compiles: list[Any]) -> None:
    model = TinyModel(make_spec())
    names = list(model.state_dict())
    compile_forward(model)
    assert compiles[-1] == model._call_impl
    assert list(model.state_dict()) == names
    assert model._compiled_call_impl is not None
    assert copy.deepcopy(model)._compiled_call_impl is None


def test_learner_compiles_only_if_it_is_asked_to(compiles: list[Any]) -> None:
    plain = learner_parts(compile=False)
    assert compiles == []
    parts = learner_parts(compile=True)
    assert compiles[-1] == parts.learner.model._call_impl
    assert list(parts.learner.tensors()) == list(plain.learner.tensors())
    with parts.policy.read() as (replica, _):
        assert replica._compiled_call_impl is None


def test_machine_without_a_compiler_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: object) -> None:
        raise RuntimeError("No working C++ compiler found in …")

    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(ConfigError, match=r"compile=true: torch cannot compile for cpu .*No working C\+\+ compiler"):
        compile_forward(TinyModel(make_spec()))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": ModelConfig(lstm=8)}, "networks without a memory, not model.lstm=8"),
        ({"model": ModelConfig(gru=8)}, "networks without a memory, not model.lstm=0 model.gru=8"),
        ({"lockstep": True}, "lockstep=true could not promise"),
        ({"ranks": RanksConfig(count=2)}, "needs ranks.count=1, not 2"),
    ],
)
def test_settings_that_cannot_be_compiled_are_refused(settings: dict[str, Any], words: str) -> None:
    check(LearnerConfig(**settings))
    with pytest.raises(ConfigError, match=words):
        check(LearnerConfig(**settings, compile=True))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_network_learns_what_the_plain_one_does_and_its_checkpoint_fits_that() -> None:
    """By a real compiler, which takes a minute or two."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-m", "tests.compiled"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
