"""Serving and learning on streams of their own: no kernel meets another one that it conflicts with.

Each fence is taken away in turn, and then there are races: none is there for nothing, and the search finds them.
"""

from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest

import seedrl.policy
import seedrl.store
from seedrl.config import ModelConfig
from seedrl.device import after_serving, own_stream
from seedrl.specs import ArraySpec, EnvSpec, discrete
from tests.accelerator.order import ORDER, TrackedThreading
from tests.accelerator.rig import LENGTH, Loop
from tests.accelerator.simulated import GPU

VECTOR = EnvSpec(ArraySpec((3,), "float32"), discrete(3))
IMAGE = EnvSpec(ArraySpec((1, 36, 36), "uint8"), discrete(3))
KINDS: dict[str, tuple[ModelConfig, EnvSpec, int]] = {
    "memory": (ModelConfig(name="mlp", lstm=4), VECTOR, 1),
    "images": (ModelConfig(name="nature"), IMAGE, 2),
}


@pytest.fixture(autouse=True)
def _tracked_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (seedrl.store, seedrl.policy):
        monkeypatch.setattr(module, "threading", TrackedThreading)


def races(kind: str, updates: int = 4) -> Counter[str]:
    """Let both threads take turns for some updates, with a store that is always nearly full."""
    config, spec, frame_stack = KINDS[kind]
    with ORDER.watching() as found, ExitStack() as learner:
        rig = Loop(spec, config, GPU, frame_stack=frame_stack, capacity=4)
        with ORDER.thread("learner"):
            learner.enter_context(own_stream(GPU))
            after_serving(GPU)
            stream = ORDER.stream
        with ORDER.thread("server"):
            rig.inference.warm_up(4)
            sessions = rig.join_all(requests=2)
        while rig.learning.updates < updates:
            with ORDER.thread("server"):
                for _ in range(LENGTH):
                    rig.inference.run(rig.requests(sessions))
                    rig.inference.finish_unrolls()
            with ORDER.thread("learner"):
                rig.update()
        return Counter({race.replace(stream, "learner"): count for race, count in found.items()})


@pytest.mark.parametrize("kind", KINDS)
def test_threads_on_streams_of_their_own_race_only_where_the_algorithm_was_built_on_the_other_one(kind: str) -> None:
    """The learner replaces a tensor that was allocated before it had a stream."""
    assert list(races(kind)) == ["memory of default is freed while learner uses it"]


@pytest.mark.parametrize(
    ("module", "fence"),
    [(seedrl.store, "after_serving"), (seedrl.store, "finish"), (seedrl.policy, "finish")],
)
def test_every_fence_is_needed(module: Any, fence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, fence, lambda device: None)
    assert races("memory")
