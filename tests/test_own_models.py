"""Models and algorithms of the user's own: what does not fit the spaces is said before training."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms.base import Loss
from seedrl.algorithms.build import build_algorithm
from seedrl.algorithms.check import check_loss, first_loss, sample_unrolls
from seedrl.config import LearnerConfig
from seedrl.errors import ConfigError
from seedrl.models.build import build_run_model
from seedrl.specs import ArraySpec, ContinuousSpec, EnvSpec, discrete
from seedrl.types import ModelInput, ModelOutput
from tests.builders import learner_parts
from tests.fakes import TinyModel, make_spec

SPECS = {
    "vector": make_spec(),
    "image": make_spec((1, 8, 8), "uint8", 5),
    "torques": EnvSpec(ArraySpec((3,), "float64"), ContinuousSpec((-1.0, -1.0), (1.0, 1.0), (2,))),
}


class Own(TinyModel):
    """A model that is wrong in one way."""

    def __init__(self, spec: EnvSpec, wrong: str = "", core_size: int = 0) -> None:
        super().__init__(spec, core_size)
        self.wrong = wrong
        self.forwards = 0

    def forward(self, inputs: ModelInput, core_state: Tensor) -> Any:
        self.forwards += 1
        output, state = super().forward(inputs, core_state)
        if self.wrong == "raises":
            self.no_such_layer(output)
        changed = {
            "": (output, state),
            "logits": (output._replace(logits=output.logits[..., :-1]), state),
            "value": (output._replace(value=output.value.unsqueeze(-1)), state),
            "core": (output, state.new_zeros(len(state), self.core_size + 1)),
            "dtype": (output._replace(value=output.value.double()), state),
            "nan": (output._replace(value=output.value / 0 * 0), state),
            "plain": (output.logits, output.value),
            "unroll": (output._replace(logits=output.logits[:1]), state),
        }
        return changed[self.wrong]


def build(wrong: str, spec: EnvSpec = SPECS["vector"], **options: Any) -> nn.Module:
    config = LearnerConfig()
    config.model.name, config.model.options = f"{__name__}:Own", {"wrong": wrong, **options}
    return build_run_model(config, spec)


@pytest.mark.parametrize("core_size", [0, 4])
@pytest.mark.parametrize("kind", SPECS)
def test_model_that_fits_the_spaces_is_built_and_not_changed(kind: str, core_size: int) -> None:
    torch.manual_seed(5)
    model = build("", SPECS[kind], core_size=core_size)
    assert isinstance(model, Own)
    assert model.forwards == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            "logits",
            r"expected logits of shape \[1, 2, 3\] \(the last size is spec\.policy_size, 3 .*, saw float32\[1, 2, 2\]$",
        ),
        ("value", r"expected value of shape \[1, 2\] \(.*\), saw float32\[1, 2, 1\]$"),
        ("core", r"expected core_state of shape \[2, 0\] \(.*core_size of the model, 0\), saw float32\[2, 1\]$"),
        ("dtype", r"expected value in float32, saw float64\[1, 2\]; convert it by \.float\(\)$"),
        ("nan", "expected finite value, saw nan$"),
        (
            "plain",
            r"must return \(ModelOutput\(logits, value\), core_state\), returned \(float32\[1, 2, 3\], float32.*\)$",
        ),
        ("unroll", r"expected logits of shape \[3, 2, 3\]"),
    ],
)
def test_model_with_wrong_outputs_is_refused_before_training(wrong: str, words: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^tests/test_own_models\.py:\d+ in forward: model\.name={__name__}:Own.*{words}"
    ):
        build(wrong)


def test_model_that_raises_is_named_with_its_line_and_traceback() -> None:
    with pytest.raises(ConfigError, match=r"^tests/test_own_models\.py:\d+ in forward: .*no_such_layer") as raised:
        build("raises")
    assert "self.no_such_layer(output)" in raised.value.traceback


# Algorithms.


class NoMembers:
    def __init__(self, *arguments: Any) -> None:
        pass


def test_algorithm_without_the_methods_of_one_is_refused() -> None:
    config = LearnerConfig().algorithm
    config.name = f"{__name__}:NoMembers"
    with pytest.raises(
        ConfigError, match=r"has no batches, valid, loss, stepped, tensors, load, overlap; seedrl/algorithms"
    ):
        build_algorithm(config, Actions(SPECS["vector"]), TinyModel(SPECS["vector"]))


WITH_GRADIENT = torch.zeros((), requires_grad=True) * 2


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (WITH_GRADIENT, r"loss must return a Loss\(total, report\), returned Tensor$"),
        (Loss(WITH_GRADIENT.expand(3), {}), r"expected Loss.total to be a scalar, shape \[\], saw shape \[3\]$"),
        (Loss(WITH_GRADIENT.detach(), {}), "Loss.total has no gradient"),
        (Loss(WITH_GRADIENT, {"the loss": WITH_GRADIENT}), "saw 'the loss'"),
        (Loss(WITH_GRADIENT, {"loss_2": torch.zeros(2)}), r"saw 'loss_2': shape \[2\]$"),
    ],
)
def test_loss_that_cannot_be_trained_on_is_refused(loss: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^algorithm\.name=mine: .*{words}"):
        check_loss(loss, "algorithm.name=mine")


def test_learner_checks_the_first_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = learner_parts()
    detached = Loss(torch.zeros(()), {})
    monkeypatch.setattr(parts.learner._algorithm, "loss", lambda *arguments: detached)
    parts.record()
    with pytest.raises(ConfigError, match="has no gradient"):
        parts.update()


@pytest.mark.parametrize("name", ["ppo", "vtrace", "pqn", "dqn", "bc"])
@pytest.mark.parametrize("core_size", [0, 4])
def test_sample_unrolls_are_good_enough_for_a_first_loss(name: str, core_size: int) -> None:
    spec, config = SPECS["vector"], LearnerConfig().algorithm
    config.name, config.passes, config.minibatches, config.entropy_cost, config.on_policy = name, 1, 1, 0.01, False
    model = TinyModel(spec, core_size)
    algorithm = build_algorithm(config, Actions(spec), model)
    loss = first_loss(algorithm, sample_unrolls(spec, Actions(spec), model, 4, 3), model, "algorithm.name=mine")
    assert loss.total.isfinite()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_mask_of_choices_is_all_ones_in_samples() -> None:
    spec = EnvSpec({"action_mask": ArraySpec((2,), "int8"), "eye": ArraySpec((2,), "float32")}, discrete(2))
    config = LearnerConfig()
    config.model.name = f"{__name__}:OfTwoLeaves"
    assert build_run_model(config, spec)


class OfTwoLeaves(nn.Module):
    core_size = 0

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        assert isinstance(inputs.observation, dict)
        assert inputs.observation["action_mask"].all()
        heads = self.linear(inputs.observation["eye"])
        return ModelOutput(heads[..., :-1], heads[..., -1]), core_state
