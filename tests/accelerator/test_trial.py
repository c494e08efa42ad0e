"""The trial of a device, on the simulated accelerator: as it is, and with a fault."""

import re

import pytest
from torch import Tensor

from seedrl.config import LearnerConfig
from seedrl.errors import ConfigError
from seedrl.monitoring.doctor import device
from seedrl.roles.device_trial import memory_taken, trials
from seedrl.specs import ArraySpec, EnvSpec, discrete
from tests.accelerator import simulated, streams
from tests.accelerator.simulated import GPU


def failed() -> list[str]:
    return [trial.words for trial in trials(GPU) if not trial.is_passed]


def test_trials_of_the_accelerator_pass() -> None:
    assert failed() == []


def test_trial_finds_a_kernel_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(simulated.KERNELS, "relu", lambda values: values.abs())
    assert len(failed()) == 2


def test_trial_finds_an_update_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: streams.SimulatedModule, mode: str) -> None:
        if mode == "error":
            raise RuntimeError("called a synchronizing operation")

    monkeypatch.setattr(streams.SimulatedModule, "set_sync_debug_mode", refuse, raising=False)
    assert failed() == ["an update makes the host wait: called a synchronizing operation"]


def test_trial_finds_copies_that_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def unfinished(download: object) -> object:
        copy: Tensor = download._copy  # type: ignore[attr-defined]
        return copy.numpy()

    monkeypatch.setattr("seedrl.roles.device_trial.Download.wait", unfinished)
    assert "arrays return changed" in failed()


def test_doctor_shows_the_trials_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seedrl.device.ACCELERATORS", ["gpu"])
    chosen, described, *others = list(device(LearnerConfig(device="gpu")))
    assert chosen.words.startswith("device: gpu:0")
    assert described.words.startswith("device: simulated, 1,024 of 1,024 MiB free; CUDA")
    assert [finding.is_good for finding in others] == [True] * 6


def test_trial_finds_graphs_that_compute_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    replay = simulated.CUDAGraph.replay

    def forget_a_kernel(graph: simulated.CUDAGraph) -> None:
        """As if one had read memory that has moved since it was recorded."""
        graph.kernels = [kernel for kernel in graph.kernels if kernel.name != "addmm"]
        replay(graph)

    monkeypatch.setattr(simulated.CUDAGraph, "replay", forget_a_kernel)
    words = failed()
    assert len(words) == 2
    assert all("served with graphs differs by" in each for each in words)


def test_trial_names_graphs_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(graph: simulated.CUDAGraph, pool: object, capture_error_mode: str) -> None:
        raise ConfigError("the model cannot be recorded as a CUDA graph")

    monkeypatch.setattr(simulated.CUDAGraph, "capture_begin", refuse)
    assert [words.partition(":")[0] for words in failed()] == [
        "a convolutional network cannot be served with graphs",
        "one with an LSTM cannot be served with graphs",
    ]


@pytest.mark.parametrize("graphs", [None, False])
def test_memory_of_serving_and_training_is_measured_for_the_settings_of_a_run(graphs: bool | None) -> None:
    config = LearnerConfig()
    config.serving.max_slots, config.serving.graphs = 16, graphs
    words = memory_taken(config, EnvSpec(ArraySpec((3,), "float32"), discrete(2)), GPU)
    serving, training = (float(number.replace(",", "")) for number in re.findall(r"([\d,.]+) MiB", words))
    assert ("with graphs of 5 sizes" in words) is (graphs is None)
    assert serving > 0
    assert training > 0
