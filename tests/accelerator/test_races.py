"""Serving and learning on streams of their own: no kernel meets another one that it conflicts with.

Each fence is taken away in turn, and then there are races: none is there for nothing, and the search finds them.
"""

from collections import Counter
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

import seedrl.policy
import seedrl.store
from seedrl.config import ModelConfig
from seedrl.device import Download, learning_stream, serving_stream
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


def races_in_flight() -> Counter[str]:
    """Let the learner make two updates during one batch; the second one replaces the weights that the batch reads."""
    config, spec, _ = KINDS["memory"]
    with ORDER.watching() as found, ExitStack() as threads:
        with learning_stream(GPU):
            rig = Loop(spec, config, GPU, capacity=2 * BATCH)
        with ORDER.thread("learner"):
            threads.enter_context(learning_stream(GPU))
        with ORDER.thread("server"):
            threads.enter_context(serving_stream(GPU))
            rig.inference.warm_up(4)
            sessions = rig.join_all()
        for _ in range(3):
            serve(rig, sessions)
        with ORDER.thread("server"):
            assert rig.inference.finish_unrolls()
            rig.inference.launch(rig.requests(sessions))
        with ORDER.thread("learner"):
            assert rig.update()
            assert rig.update()
        with ORDER.thread("server"):
            rig.inference.finish()
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


def test_updates_while_a_batch_is_in_flight_never_race() -> None:
    assert races_in_flight() == Counter()


@pytest.mark.parametrize("module", [seedrl.store, seedrl.policy])
def test_learner_has_to_finish_what_serving_uses_next(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "finish", lambda device: None)
    assert races("memory")


def test_weights_have_to_wait_for_the_batch_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of a replica is released as soon as a batch is launched."""
    monkeypatch.setattr(seedrl.policy, "after_serving", lambda device: None)
    assert any(race.startswith("_foreach_copy_") for race in races_in_flight())


def test_unrolls_need_no_fence_because_the_host_has_waited_for_their_last_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serving commits an unroll after its actions have arrived, which come after everything that the batch writes."""
    monkeypatch.setattr(Download, "wait", arrived_unnoticed)
    assert any("reads what is written by index_copy_" in race for race in races("memory"))


def arrived_unnoticed(download: Download) -> NDArray[Any]:
    """Let the actions arrive without the host learning that the device is done."""
    done = ORDER.clock(ORDER.stream)
    with ORDER.thread("another"):
        ORDER.host_waits(done)
    return download._copy.numpy()
