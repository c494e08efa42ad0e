"""Networks for images in bfloat16: close to 32 bits, alike in serving and training, and refused where it cannot be."""

import copy
import subprocess
from typing import Any

import pytest
import torch
from torch import nn

from seedrl.config import ModelConfig, Precision
from seedrl.errors import ConfigError
from seedrl.models import precision
from seedrl.models.build import build_model
from seedrl.models.precision import is_low, lower
from seedrl.policy import Policy
from tests.builders import make_spec
from tests.test_models import SPECS, core_of, model_input

CPU = torch.device("cpu")
IMAGES = ("nature", "impala")


def lowered(name: str, **settings: Any) -> nn.Module:
    """A model that computes in bfloat16, as it does on any processor, if slowly on some."""
    model = build_model(ModelConfig(name=name, **settings), SPECS[name], seed=1)
    for encoder in model.modules():
        if isinstance(encoder, precision.ImageEncoder):
            encoder.is_low = True
    return model


@pytest.fixture(autouse=True)
def bfloat16() -> None:
    if torch.ops.mkldnn._is_mkldnn_bf16_supported() and not precision._works_on_cpu():
        pytest.skip("this processor announces bfloat16 and does not have it")


@pytest.mark.parametrize("name", IMAGES)
def test_lowered_model_is_close_and_returns_32_bits(name: str) -> None:
    low = lowered(name)
    full = build_model(ModelConfig(name=name), SPECS[name], seed=1)
    inputs, core_state = model_input(SPECS[name], rows=3, batch=2), core_of(low, batch=2)
    rough, exact = low(inputs, core_state)[0], full(inputs, core_state)[0]
    assert rough.logits.dtype == rough.value.dtype == torch.float32
    assert not torch.equal(rough.value, exact.value)  # it does compute with other numbers
    torch.testing.assert_close(rough.value, exact.value, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", IMAGES)
def test_lowered_model_trains_weights_of_32_bits(name: str) -> None:
    model = lowered(name)
    output, _ = model(model_input(SPECS[name], rows=3, batch=2), core_of(model, batch=2))
    (output.logits.sum() + output.value.sum()).backward()
    for parameter in model.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("lstm", [0, 8])
def test_lowered_policy_serves_what_is_trained_bit_for_bit(name: str, lstm: int) -> None:
    """On-policy data then has a log ratio of exactly zero wherever batches have the same shape."""
    model = lowered(name, lstm=lstm)
    policy = Policy(lowered(name, lstm=lstm), version=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    policy.publish(model, version=1)
    inputs, core_state = model_input(SPECS[name], rows=1, batch=5), core_of(model, batch=5)
    trained = model(inputs, core_state)[0]
    with torch.no_grad(), policy.read() as (replica, _):
        served = replica(inputs, core_state)[0]
    assert torch.equal(served.logits, trained.logits)
    assert torch.equal(served.value, trained.value)


def test_lowered_checkpoint_has_the_same_tensors_as_one_of_32_bits() -> None:
    low, full = lowered("nature").state_dict(), build_model(ModelConfig(name="nature"), SPECS["nature"], 1).state_dict()
    assert {name: (t.dtype, t.shape) for name, t in low.items()} == {n: (t.dtype, t.shape) for n, t in full.items()}


def test_auto_lowers_images_where_the_processor_can_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = build_model(ModelConfig(), make_spec((3,)), seed=1)
    for works in (True, False):
        monkeypatch.setattr(precision, "_works_on_cpu", lambda works=works: works)
        images = build_model(ModelConfig(name="nature"), SPECS["nature"], seed=1)
        lower(images, Precision.auto, CPU)
        assert is_low(images) is works
        lower(vectors, Precision.auto, CPU)
        assert not is_low(vectors)


def test_bf16_by_name_is_refused_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_works_on_cpu", lambda: False)
    with pytest.raises(ConfigError, match=r"model\.precision=bf16 does not work on the cpu of this machine"):
        lower(build_model(ModelConfig(name="nature"), SPECS["nature"], 1), Precision.bf16, CPU)
    with pytest.raises(ConfigError, match="is for the networks nature and impala"):
        lower(build_model(ModelConfig(), make_spec((3,)), 1), Precision.bf16, CPU)


@pytest.mark.parametrize("code", ["import os, signal; os.kill(os.getpid(), signal.SIGILL)", "raise SystemExit(1)"])
def test_processor_that_dies_of_bfloat16_is_found_out_by_another_process(
    code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "_TRIAL", code)
    monkeypatch.setattr(precision.torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert precision._works_on_cpu.__wrapped__() is False


def test_trial_that_hangs_counts_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*args: Any, **kwargs: Any) -> None:
        raise subprocess.TimeoutExpired(cmd="python", timeout=kwargs["timeout"])

    monkeypatch.setattr(precision.subprocess, "run", hang)
    monkeypatch.setattr(precision.torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert precision._works_on_cpu.__wrapped__() is False


def test_lowered_model_keeps_its_precision_in_copies() -> None:
    assert is_low(copy.deepcopy(lowered("nature")))
