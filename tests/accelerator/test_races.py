"""Serving and learning on streams of their own: no kernel meets another one that it conflicts with.

Each fence is taken away in turn, and then there are races: none is there for nothing, and the search finds them.
"""

from collections import Counter
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch

import seedrl.policy
import seedrl.store
from seedrl.config import ModelConfig
from seedrl.device import learning_stream, serving_stream
from seedrl.serving.sessions import Session
from seedrl.specs import ArraySpec, EnvSpec, discrete
from tests.accelerator.order import ORDER, TrackedThreading
from tests.accelerator.rig import BATCH, LENGTH, Loop
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


def races(
    kind: str,
    updates: int = 4,
    builder: AbstractContextManager[None] | None = None,
    memory: torch.device | None = None,
    graphs: bool = False,
) -> Counter[str]:
    """Let both threads take turns for some updates, with a store that is always nearly full."""
    config, spec, frame_stack = KINDS[kind]
    with ORDER.watching() as found, ExitStack() as threads:
        with builder or learning_stream(GPU):
            rig = Loop(spec, config, GPU, frame_stack=frame_stack, capacity=4, memory=memory, graphs=graphs)
        with ORDER.thread("learner"):
            threads.enter_context(learning_stream(GPU))
        with ORDER.thread("server"):
            threads.enter_context(serving_stream(GPU))
            rig.inference.warm_up(4)
            sessions = rig.join_all(requests=2)
        while rig.learning.updates < updates:
            serve(rig, sessions)
            with ORDER.thread("learner"):
                unrolls = rig.store.take(BATCH, timeout=0)
            if unrolls is None:
                continue
            serve(rig, sessions)  # while the update runs
            with ORDER.thread("learner"):
                rig.learner.train(unrolls)
                rig.learner.publish(rig.policy)
        return Counter(found)


def serve(rig: Loop, sessions: list[Session]) -> None:
    """Run batches as long as entries are free."""
    with ORDER.thread("server"):
        for _ in range(LENGTH):
            if rig.inference.finish_unrolls():
                rig.inference.run(rig.requests(sessions))


@pytest.mark.parametrize(
    ("memory", "graphs"),
    [(GPU, False), (GPU, True), (torch.device("cpu"), False)],
    ids=["kernels", "graphs", "store on the host"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_threads_on_streams_of_their_own_never_race(kind: str, memory: torch.device, graphs: bool) -> None:
    assert races(kind, memory=memory, graphs=graphs) == Counter()


def test_building_on_another_stream_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner replaces a tensor of the algorithm: its memory must not go back to a stream that may reuse it."""
    assert any("is freed while" in race for race in races("memory", builder=nullcontext()))


@pytest.mark.parametrize(
    ("module", "fence"),
    [(seedrl.store, "finish"), (seedrl.policy, "finish")],
)
def test_every_fence_is_needed(module: Any, fence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, fence, lambda device: None)
    assert races("memory")
