"""The trial of a device, on the simulated accelerator: as it is, and with a fault."""

import pytest
from torch import Tensor

from seedrl.config import LearnerConfig
from seedrl.monitoring.doctor import device
from seedrl.roles.device_trial import trials
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
    chosen, *others = list(device(LearnerConfig(device="gpu")))
    assert chosen.words.startswith("device: gpu:0")
    assert [finding.is_good for finding in others] == [True] * 4
