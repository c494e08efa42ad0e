"""Tests of the trial of a device, on the CPU; tests/accelerator/test_trial.py has another one to try."""

import torch

from seedrl.roles.device_trial import trials


def test_trials_of_the_cpu_pass_and_differ_by_nothing() -> None:
    found = list(trials(torch.device("cpu")))
    assert [trial.words for trial in found if not trial.is_passed] == []
    assert [trial.words for trial in found if "0.0e+00" in trial.words] == [
        "a convolutional network trained on it differs from the CPU's by 0.0e+00 after 3 updates",
        "one with an LSTM trained on it differs from the CPU's by 0.0e+00 after 3 updates",
    ]
