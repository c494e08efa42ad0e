"""Steps that are recorded as graphs and replayed do what steps do that are launched kernel by kernel."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from seedrl.errors import ConfigError
from seedrl.serving.buckets import bucket_sizes
from seedrl.serving.seats import EVALUATION, Exploration, Seat
from tests.accelerator import simulated
from tests.accelerator.rig import LENGTH, Loop, Played
from tests.accelerator.simulated import GPU, SEQUENCE, GpuTensor, counted
from tests.accelerator.test_parity import MODELS

MIXED = [Seat(), Seat(exploration=Exploration(2.0, 0.1)), EVALUATION, Seat()]


def loop(kind: str, graphs: bool = True) -> Loop:
    config, spec, frame_stack = MODELS[kind]
    rig = Loop(spec, config, GPU, frame_stack=frame_stack, sizes=(2, 7), graphs=graphs)
    rig.inference.warm_up(4)
    return rig


def same(got: Played, expected: Played) -> None:
    assert got.metrics.updates == expected.metrics.updates >= 2
    for mine, other in zip(got.actions, expected.actions, strict=True):
        np.testing.assert_array_equal(mine, other)
    for name, weights in got.weights.items():
        assert torch.equal(weights, expected.weights[name]), name


@pytest.mark.parametrize("kind", MODELS)
def test_replayed_steps_act_and_learn_as_launched_ones_bit_for_bit(kind: str) -> None:
    same(loop(kind).play(3 * LENGTH), loop(kind, graphs=False).play(3 * LENGTH))


@pytest.mark.parametrize("kind", ["nature lstm", "gaussian"])
def test_exploration_and_evaluation_are_recorded_as_soon_as_they_are_needed(kind: str) -> None:
    """Both come with a session, after the learner has warmed up."""
    rig = loop(kind)
    same(rig.play(5 * LENGTH, seats=MIXED), loop(kind, graphs=False).play(5 * LENGTH, seats=MIXED))
    assert {recorded.kind for recorded in rig.inference._acting._program._recorded.values()} != {(False, False)}  # type: ignore[attr-defined]


def test_exploration_that_has_ended_changes_nothing_although_it_is_recorded() -> None:
    def actions(graphs: bool) -> list[Any]:
        rig = loop("mlp", graphs)
        sessions, found = rig.join_all(seats=MIXED), []
        for _ in range(4):
            found += rig.step(sessions)
        rig.seats.assign(np.arange(4), [Seat()] * 4)
        for _ in range(4):
            found += rig.step(sessions)
        return found

    for mine, other in zip(actions(graphs=True), actions(graphs=False), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_there_is_a_graph_for_each_size_and_replica_before_the_first_request() -> None:
    rig = loop("mlp")
    recorded = rig.inference._acting._program._recorded  # type: ignore[attr-defined]
    assert sorted(size for _, size in recorded) == [2, 2, 7, 7]
    assert len({model for model, _ in recorded}) == 2


def test_recording_computes_nothing() -> None:
    """As on a real device; the rig's numbers would be wrong otherwise."""
    rig = loop("mlp lstm")
    assert not rig.store.columns._logits[: -(LENGTH + 1)].cpu().any()
    assert rig.slots._core_state[:-1].cpu().eq(0).all()


class Reading(nn.Module):
    """A model that looks at a number on the host, as a user's own may."""

    core_size = 0

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Any, core_state: Tensor) -> Any:
        assert float(inputs.reward.sum()) < 1e9
        return self.model(inputs, core_state)


def test_model_that_makes_the_host_wait_is_refused_in_words() -> None:
    rig = loop("mlp")
    rig.policy._replicas = [Reading(each) for each in rig.policy._replicas]
    with pytest.raises(ConfigError, match=r"cannot be recorded as a CUDA graph.*serving.graphs=false"):
        rig.inference.warm_up(4)


@pytest.mark.parametrize("kind", ["nature", "nature lstm", "mlp gru", "gaussian", "dict with mask"])
def test_batches_of_one_size_launch_the_same_kernels_on_the_same_memory(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a graph would not be what the host would have launched, whatever the number of rows or resets."""
    rig = loop(kind, graphs=False)
    fixed = fixed_memory(rig)
    seen: list[list[tuple[str, ...]]] = []
    for sessions in ([4], [4], [1, 1, 1], [4], [3], [2, 1], [4]):
        joined = [rig.join(range(sum(sessions[:at]), sum(sessions[: at + 1]))) for at in range(len(sessions))]
        seen.append(step_kernels(rig, lambda joined=joined: rig.step(joined), fixed, monkeypatch))
        seen.append(step_kernels(rig, lambda joined=joined: rig.step(joined), fixed, monkeypatch))
    assert len(seen[0]) > 5
    assert all(each == seen[0] for each in seen)


def fixed_memory(rig: Loop) -> dict[int, str]:
    """Return the addresses of everything that stays, with names."""
    columns, stager = rig.store.columns, rig.inference._stager
    kept = {"logits": columns._logits, "value": columns._value, "core": rig.slots._core_state}
    kept |= {"small": stager._small._room, "frames": stager._frames._room, "noise": rig.inference._noise._place}
    return {tensor.raw.untyped_storage().data_ptr(): name for name, tensor in kept.items()}


def step_kernels(
    rig: Loop, run: Callable[[], object], fixed: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, ...]]:
    """Return the kernels of the part that is recorded, each with the lasting memory and the offsets that it uses."""
    found: list[tuple[str, ...]] = []
    note, own_run = simulated._note, rig.inference._acting._step.run

    def noted(func: Any, name: str, args: Any, kwargs: Any, out: Any) -> None:
        used = [each.raw for each in simulated.tree_leaves((args, kwargs)) if isinstance(each, GpuTensor)]
        known = [(fixed.get(each.untyped_storage().data_ptr(), "temporary"), each.storage_offset()) for each in used]
        found.append((name, *(f"{memory}+{offset}" for memory, offset in known)))
        note(func, name, args, kwargs, out)

    def step_run(*arguments: Any) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(simulated, "_note", noted)
            return own_run(*arguments)

    monkeypatch.setattr(rig.inference._acting._step, "run", step_run)
    run()
    monkeypatch.setattr(rig.inference._acting._step, "run", own_run)
    return found


def test_batch_with_graphs_is_one_launch_beside_the_noise() -> None:
    config, spec, frame_stack = MODELS["nature"]
    rig = Loop(spec, config, GPU, frame_stack=frame_stack, sizes=bucket_sizes(4), graphs=True)
    rig.inference.warm_up(4)
    sessions = rig.join_all(requests=2)
    rig.step(sessions)
    requests = rig.requests(sessions)
    counts = counted(lambda: rig.inference.run(requests))
    assert SEQUENCE == ["copy_", "copy_", "copy_", "graph", "copy_"]  # two uploads, the noise, the graph, the actions
    assert (counts["upload"], counts["launch"], counts["sync"]) == (2, 2, 0)
