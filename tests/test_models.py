"""The built-in networks, and how `build_model` finds them and yours."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.config import Activation, EnvConfig, LearnerConfig, ModelConfig
from seedrl.errors import ConfigError
from seedrl.models.base import ActorCritic, Masked, PopArt, core_size_of, popart_of
from seedrl.models.build import Encoders, build_model, build_run_model
from seedrl.models.check import sample_input
from seedrl.models.cores import LstmCore
from seedrl.models.images import Centre, GridEncoder, ImageEncoder
from seedrl.models.mlp import MlpEncoder, Normalize
from seedrl.models.statistics import RunningMoments, apply_statistics, discard_statistics
from seedrl.specs import ArraySpec, ContinuousSpec, EnvSpec, discrete
from seedrl.types import ModelInput, stack_frames
from seedrl.validation import check
from tests.builders import model_input, row_of, same, weights
from tests.fakes import TinyModel, make_spec

SPECS = {
    "mlp": make_spec((3,), "float32"),
    "nature": make_spec((2, 36, 36), "uint8"),  # the smallest image its kernels fit
    "impala": make_spec((2, 12, 12), "uint8"),
    "board": make_spec((6, 7, 2), "int8"),
}
LSTM = 8
every_model = pytest.mark.parametrize("name", SPECS)
with_and_without_lstm = pytest.mark.parametrize("lstm", [0, LSTM])


def built(name: str, lstm: int = 0, seed: int = 1) -> nn.Module:
    return build_model(ModelConfig(name=name, layers=[16, 16], lstm=lstm), SPECS[name], seed)


def core_of(model: nn.Module, batch: int, seed: int = 5) -> Tensor:
    return torch.randn(batch, core_size_of(model), generator=torch.Generator().manual_seed(seed))


@every_model
@with_and_without_lstm
def test_model_outputs_have_the_documented_shapes(name: str, lstm: int) -> None:
    model = built(name, lstm)
    output, core_state = model(model_input(SPECS[name], rows=4, batch=3), core_of(model, batch=3))
    assert output.logits.shape == (4, 3, 3)
    assert output.value.shape == (4, 3)
    assert core_state.shape == (3, 2 * lstm)
    assert output.logits.dtype == output.value.dtype == torch.float32


@every_model
@with_and_without_lstm
def test_model_core_size_is_two_per_lstm_unit(name: str, lstm: int) -> None:
    assert built(name, lstm).core_size == 2 * lstm


@every_model
@with_and_without_lstm
@torch.no_grad()
def test_model_rows_at_once_equal_row_by_row(name: str, lstm: int) -> None:
    """Training sees the rows of an unroll at once, inference saw them one by one: the same logits and values."""
    model = built(name, lstm)
    inputs = model_input(SPECS[name], rows=6, batch=3)
    assert inputs.reset[1:-1].any()
    first_core = core_of(model, batch=3)
    output, last_core = model(inputs, first_core)

    core_state = first_core
    for t in range(6):
        row, core_state = model(row_of(inputs, t), core_state)
        torch.testing.assert_close(row.logits[0], output.logits[t], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(row.value[0], output.value[t], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(core_state, last_core, rtol=1e-4, atol=1e-6)


@every_model
@with_and_without_lstm
@torch.no_grad()
def test_model_environments_of_a_batch_do_not_mix(name: str, lstm: int) -> None:
    model = built(name, lstm)
    inputs = model_input(SPECS[name], rows=3, batch=3)
    core_state = core_of(model, batch=3)
    output, _ = model(inputs, core_state)
    alone, _ = model(ModelInput(*(tensor[:, 1:2] for tensor in inputs)), core_state[1:2])
    torch.testing.assert_close(alone.logits[:, 0], output.logits[:, 1], rtol=1e-4, atol=1e-6)


@every_model
@torch.no_grad()
def test_model_reset_row_forgets_the_core_state(name: str) -> None:
    model = built(name, LSTM)
    inputs = model_input(SPECS[name], rows=1, batch=2)._replace(reset=torch.tensor([[True, False]]))
    remembered, remembered_core = model(inputs, core_of(model, batch=2))
    empty, empty_core = model(inputs, torch.zeros(2, 2 * LSTM))
    assert torch.equal(remembered.logits[:, 0], empty.logits[:, 0])
    assert torch.equal(remembered_core[0], empty_core[0])
    assert not torch.equal(remembered.logits[:, 1], empty.logits[:, 1])
    assert not torch.equal(remembered_core[1], empty_core[1])


def test_model_reset_row_forgets_even_a_core_state_that_is_not_finite() -> None:
    model = built("mlp", LSTM)
    inputs = model_input(SPECS["mlp"], rows=2, batch=2)._replace(reset=torch.tensor([[True, True], [False, False]]))
    output, core_state = model(inputs, torch.full((2, 2 * LSTM), torch.nan))
    assert torch.isfinite(output.logits).all()
    assert torch.isfinite(core_state).all()


def test_model_lstm_sees_the_last_action_and_the_clipped_reward() -> None:
    model = built("mlp", LSTM)
    inputs = model_input(SPECS["mlp"], rows=1, batch=2)._replace(
        last_action=torch.zeros(1, 2, dtype=torch.int64), reward=torch.ones(1, 2)
    )
    core_state = core_of(model, batch=2)

    def logits(**changes: Tensor) -> Tensor:
        output, _ = model(inputs._replace(**changes), core_state)
        return output.logits

    assert not torch.equal(logits(last_action=torch.ones(1, 2, dtype=torch.int64)), logits())
    assert not torch.equal(logits(reward=torch.zeros(1, 2)), logits())
    assert torch.equal(logits(reward=torch.full((1, 2), 50.0)), logits())


@every_model
@with_and_without_lstm
def test_model_every_parameter_gets_a_gradient(name: str, lstm: int) -> None:
    model = built(name, lstm)
    output, _ = model(model_input(SPECS[name], rows=3, batch=2), core_of(model, batch=2))
    (output.logits.square().sum() + output.value.square().sum()).backward()
    assert [n for n, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()] == []


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("name", ["mlp", "nature", "impala", "grid", "board", "tiny"])
@with_and_without_lstm
def test_model_leaves_its_inputs_alone(name: str, lstm: int, dtype: str) -> None:
    spec = make_spec((2, 36, 36), dtype)
    model = build_model(ModelConfig(name=name, layers=[16], lstm=lstm), spec, seed=1)
    inputs, core_state = model_input(spec, rows=3, batch=2), core_of(model, batch=2)
    before = [tensor.clone() for tensor in (*inputs, core_state)]
    model(inputs, core_state)
    assert all(torch.equal(*pair) for pair in zip(before, (*inputs, core_state), strict=True))


@every_model
@with_and_without_lstm
def test_build_model_same_seed_gives_the_same_weights(name: str, lstm: int) -> None:
    assert same(weights(built(name, lstm, seed=3)), weights(built(name, lstm, seed=3)))
    assert not same(weights(built(name, lstm, seed=3)), weights(built(name, lstm, seed=4)))


@pytest.mark.parametrize(
    ("shape", "dtype", "encoder"),
    [((3,), "float32", MlpEncoder), ((5, 2), "int32", MlpEncoder), ((4, 36, 36), "uint8", ImageEncoder)],
)
def test_build_model_auto_takes_nature_for_images_and_mlp_for_the_rest(
    shape: tuple[int, ...], dtype: str, encoder: type
) -> None:
    model = build_model(ModelConfig(name="auto"), make_spec(shape, dtype), seed=1)
    assert isinstance(model.encoder, encoder)
    model(model_input(make_spec(shape, dtype), rows=2, batch=2), torch.zeros(2, 0))


def test_build_model_mlp_has_the_hidden_layers_of_the_settings() -> None:
    model = build_model(ModelConfig(name="mlp", layers=[7, 5]), SPECS["mlp"], seed=1)
    shapes = [tuple(parameter.shape) for name, parameter in model.named_parameters() if name.endswith("weight")]
    assert shapes == [(7, 3), (5, 7), (3, 5), (1, 5)]


@pytest.mark.parametrize("name", ["nature", "impala"])
def test_build_model_convolutions_are_channels_last(name: str) -> None:
    convolutions = [module for module in built(name).modules() if isinstance(module, nn.Conv2d)]
    assert convolutions
    assert all(conv.weight.is_contiguous(memory_format=torch.channels_last) for conv in convolutions)


def test_grid_a_key_is_as_far_from_a_ball_as_from_a_wall() -> None:
    """Neighbouring numbers are not similar things: every cell weighs which of them it holds, not how large it is."""
    encoder = GridEncoder(ArraySpec((7, 7, 3), "uint8"))
    column = encoder.linear.weight.detach().view(128, 7 * 7 * 3, -1)[:, 40]
    wall, key, ball = (column[:, kind] for kind in (2, 5, 6))
    assert (key - ball).norm() > 0.7 * (key - wall).norm()
    world = torch.full((1, 7, 7, 3), 200, dtype=torch.uint8)  # no small number: an amount
    assert not torch.equal(encoder(world), encoder(world + 50))


def test_lstm_forgets_slowly_before_it_has_learned_anything() -> None:
    core = LstmCore(inputs=4, units=64)
    state = torch.cat([torch.zeros(1, 64), torch.ones(1, 64)], dim=-1)
    _, later = core(torch.zeros(5, 1, 4), torch.zeros(5, 1, dtype=torch.bool), state)
    assert later[:, 64:].mean() > 0.15  # with a forget gate half open it would be 0.03


def test_mlp_sees_bytes_in_units_of_their_range() -> None:
    encoder = MlpEncoder(ArraySpec((3,), "uint8"), sizes=[])
    assert torch.allclose(encoder(torch.tensor([[0, 51, 255]], dtype=torch.uint8)), torch.tensor([[0.0, 0.2, 1.0]]))


def test_model_image_centre_tracks_the_mean_in_training_only() -> None:
    centre = Centre(make_spec((2, 3, 3), "uint8").observations[0])
    for value in (10, 30):
        centre(torch.full((4, 2, 3, 3), value, dtype=torch.uint8))
        apply_statistics(centre)
    with torch.no_grad():
        centred = centre(torch.full((1, 2, 3, 3), 84, dtype=torch.uint8))
        assert torch.equal(centred, torch.ones(1, 2, 3, 3))  # (84 - 20) / 64
    apply_statistics(centre)
    assert int(centre.seen) == 2


# Names that cannot be built, and your own classes.


class Forgetful(nn.Module):
    """An own model without a core_size."""

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()


class NotAModule:
    core_size = 0

    def __init__(self, spec: EnvSpec) -> None:
        pass


def build_named(name: str, spec: EnvSpec | None = None, **options: Any) -> nn.Module:
    return build_model(ModelConfig(name=name, options=options), spec or make_spec(), seed=1)


@pytest.mark.parametrize("name", ["resnet", "MLP", ""])
def test_build_model_unknown_name_is_refused_with_the_choices(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.name='{name}' is not one of auto, mlp, nature, impala"):
        build_named(name)


def test_board_network_sees_the_same_threat_alike_wherever_it_is() -> None:
    """The features of a window move with the discs, which is what fully connected layers lack."""
    trunk = build_model(ModelConfig(name="board"), SPECS["board"], seed=1).encoder.trunk
    board = torch.zeros(2, 2, 6, 7)
    board[0, 0, 5, 0:3] = board[1, 0, 5, 3:6] = 1.0  # three in the bottom row, at its left and further right
    left, right = trunk(board)
    assert left.shape == (128, 3, 4)
    assert torch.allclose(left[:, :, 0], right[:, :, 3], atol=1e-6)
    assert not torch.allclose(left[:, :, 0], right[:, :, 0], atol=1e-3)


@pytest.mark.parametrize("name", ["nature", "impala", "board"])
def test_build_model_image_network_on_vectors_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"model.name={name} needs images .* observations are float32\[2\]"):
        build_named(name)


def test_build_model_own_class_is_built_with_spec_and_options() -> None:
    model = build_named("tests.fakes:TinyModel", make_spec((4,)), core_size=5)
    assert isinstance(model, TinyModel)
    assert model.core_size == 5
    assert model.heads.in_features == 4 + 5


def test_build_model_own_class_same_seed_gives_the_same_weights() -> None:
    assert same(weights(build_named("tests.fakes:TinyModel")), weights(build_named("tests.fakes:TinyModel")))


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("tests.nowhere:TinyModel", {}, "there is no module tests.nowhere, neither installed nor in "),
        ("tests.fakes:HugeModel", {}, "tests.fakes has no HugeModel; did you mean tests.fakes:AuxModel?"),
        ("tests.fakes:", {}, "tests.fakes has no such name"),
        (":TinyModel", {}, "Empty module name"),
        ("tests.fakes:TinyModel", {"core_szie": 1}, "unexpected keyword argument 'core_szie'"),
        (f"{__name__}:Forgetful", {}, "must be an nn.Module with an integer core_size"),
        (f"{__name__}:NotAModule", {}, "must be an nn.Module with an integer core_size"),
    ],
)
def test_build_model_own_class_that_does_not_work_is_refused(name: str, options: dict[str, int], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.name={name}:? .*{re.escape(reason)}"):
        build_named(name, **options)


# Values in units of their targets


def make_popart(seed: int = 0) -> PopArt:
    torch.manual_seed(seed)
    return PopArt(nn.Linear(4, 1))


def follow(head: PopArt, targets: Tensor) -> None:
    head.rescale(targets.double().mean(), (targets.double() - head.moments.mean).square().mean())


def test_popart_rescaled_changes_no_value() -> None:
    head, features = make_popart(), torch.randn(64, 4)
    for mean, deviation in ((50.0, 40.0), (-3.0, 9.0), (0.0, 0.0), (1e4, 1e4)):
        before = head(features)
        follow(head, mean + deviation * torch.randn(100))
        torch.testing.assert_close(head(features), before, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("mean", "deviation"), [(30.0, 7.0), (1e4, 10.0), (-1e5, 10.0)])
def test_popart_unit_and_mean_are_those_of_all_targets_so_far(mean: float, deviation: float) -> None:
    head = make_popart()
    targets = mean + deviation * torch.randn(10, 100, generator=torch.Generator().manual_seed(1))
    for batch in targets:
        follow(head, batch)
    torch.testing.assert_close(head.mean, targets.mean())
    torch.testing.assert_close(head.unit, targets.std(correction=0), rtol=1e-3, atol=0)


def test_popart_is_found_behind_a_mask() -> None:
    spec = EnvSpec({"action_mask": ArraySpec((3,), "int8"), "state": ArraySpec((2,), "float32")}, discrete(3))
    model = build_model(ModelConfig(popart=True), spec, seed=1)
    assert isinstance(model, Masked)
    assert isinstance(popart_of(model), PopArt)
    assert popart_of(build_model(ModelConfig(popart=False), spec, seed=1)) is None


# Observations in running units


def learn(module: nn.Module, batch: Tensor) -> None:
    module(batch)
    apply_statistics(module)


def test_normalize_uses_what_it_knew_before_and_learns_only_in_training() -> None:
    normalize, rows = Normalize(2), torch.tensor([[1.0, 10.0], [3.0, 30.0]])
    with torch.no_grad():
        torch.testing.assert_close(normalize(rows), rows.clamp(-10, 10))
    apply_statistics(normalize)
    assert float(normalize.moments.seen) == 0
    torch.testing.assert_close(normalize(rows), rows.clamp(-10, 10))
    apply_statistics(normalize)
    torch.testing.assert_close(normalize.moments.mean.tolist(), [2.0, 20.0])
    with torch.no_grad():
        torch.testing.assert_close(normalize(rows), torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))


def test_normalize_clips_outliers() -> None:
    normalize = Normalize(1)
    learn(normalize, torch.randn(1000, 1))
    with torch.no_grad():
        assert normalize(torch.tensor([[1e9], [-1e9]])).tolist() == [[10.0], [-10.0]]


@pytest.mark.parametrize("mean", [0.0, 1e4, -1e6])
def test_normalize_gives_unit_deviation_far_from_zero(mean: float) -> None:
    normalize, generator = Normalize(1), torch.Generator().manual_seed(1)
    for _ in range(50):
        learn(normalize, mean + torch.randn(200, 1, generator=generator))
    with torch.no_grad():
        found = normalize(mean + torch.randn(10_000, 1, generator=generator))
    assert found.mean().item() == pytest.approx(0.0, abs=0.05)
    assert found.std().item() == pytest.approx(1.0, abs=0.05)


def test_normalize_mean_follows_slow_changes_far_from_zero() -> None:
    """An update of less than the resolution of float32 at the mean is not lost."""
    normalize = Normalize(1)
    normalize.moments.seen.fill_(1e6)
    normalize.moments.mean.fill_(1e5)
    for _ in range(5000):
        learn(normalize, torch.full((4, 1), 1e5 + 0.5))
    assert normalize.moments.mean.item() == pytest.approx(1e5 + 0.5, abs=0.01)


def test_running_moments_are_those_of_the_weighted_mixture_of_all_batches() -> None:
    moments, generator = RunningMoments(), torch.Generator().manual_seed(1)
    batches = [
        scale * torch.randn(size, generator=generator) + scale for size, scale in ((5, 1.0), (50, 9.0), (2, -4.0))
    ]
    for batch in batches:
        moments.merge_sums(moments.sums(batch.double() - moments.mean))
    mean = torch.stack([batch.double().mean() for batch in batches]).mean()
    square = torch.stack([batch.double().square().mean() for batch in batches]).mean()
    torch.testing.assert_close(moments.mean, mean)
    torch.testing.assert_close(moments.variance, square - mean.square())


def test_running_moments_of_parts_of_a_batch_add_up_to_those_of_the_whole() -> None:
    """Ranks join their moments in this way; the weights of ranks do not matter as long as they are equal."""
    rows = 1e4 + torch.randn(30, 2, generator=torch.Generator().manual_seed(1))
    whole, parts = RunningMoments(2), RunningMoments(2)
    for batch in rows.split(15):
        whole.merge_sums(whole.sums(batch.double() - whole.mean))
        parts.merge_sums(
            torch.stack([parts.sums(part.double() - parts.mean) for part in batch.split([4, 11])]).sum(dim=0) / 3
        )
    torch.testing.assert_close(parts.variance, whole.variance)
    torch.testing.assert_close(parts.mean, whole.mean)


@pytest.mark.parametrize("huge", [2e19, 3e38, float("inf"), float("nan")])
def test_statistics_of_a_batch_with_a_huge_value_are_left_out(huge: float) -> None:
    normalize = Normalize(2)
    learn(normalize, torch.randn(10, 2))
    before = weights(normalize)
    rows = torch.randn(10, 2)
    rows[3, 1] = huge
    found = normalize(rows)
    assert bool(torch.isfinite(found).all()) is not (huge != huge)
    apply_statistics(normalize)
    assert same(before, weights(normalize))
    learn(normalize, torch.randn(10, 2))
    assert float(normalize.moments.seen) == 2


def test_statistics_of_images_that_are_not_finite_are_left_out() -> None:
    centre = Centre(ArraySpec((1, 4, 4), "float32"))
    learn(centre, torch.ones(8, 1, 4, 4))
    before = weights(centre)
    learn(centre, torch.full((8, 1, 4, 4), 3e38).index_fill(0, torch.tensor([0]), float("inf")))
    assert same(before, weights(centre))


@pytest.mark.parametrize("name", ["mlp", "nature"])
def test_statistics_that_are_discarded_leave_the_model_as_it_was(name: str) -> None:
    model = build_model(ModelConfig(name=name, normalize=True), SPECS[name], seed=1)
    before = weights(model)
    model(model_input(SPECS[name], rows=2, batch=4), torch.zeros(4, 0))
    assert same(before, weights(model))
    discard_statistics(model)
    apply_statistics(model)
    assert same(before, weights(model))
    model(model_input(SPECS[name], rows=2, batch=4), torch.zeros(4, 0))
    apply_statistics(model)
    assert not same(before, weights(model))


# Choices that the environment forbids


def test_masked_model_never_gives_a_forbidden_choice_a_chance() -> None:
    spec = EnvSpec(
        {"action_mask": ArraySpec((5,), "int8"), "state": ArraySpec((2,), "float32")},
        {"first": discrete(2), "second": discrete(3)},
    )
    model = build_model(ModelConfig(), spec, seed=1)
    mask = torch.tensor([[[1, 0, 0, 1, 1]], [[0, 1, 1, 0, 0]]], dtype=torch.int8)
    observation = {"action_mask": mask, "state": torch.randn(2, 1, 2)}
    inputs = ModelInput(observation, torch.zeros(2, 1), torch.zeros(2, 1, 2).long(), torch.zeros(2, 1).bool())
    output, _ = model(inputs, torch.zeros(1, 0))
    first, second = output.logits.split([2, 3], dim=-1)
    chances = torch.cat([first.softmax(-1), second.softmax(-1)], dim=-1)
    assert ((chances > 0) == (mask != 0)).all()
    Actions(spec).entropy(output.logits).sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


def test_masked_model_draws_uniformly_where_nothing_is_allowed() -> None:
    """The proto says so. Nothing of such a row may be infinite: it is trained on, and may explore."""
    spec = EnvSpec({"action_mask": ArraySpec((3,), "int8"), "state": ArraySpec((2,), "float32")}, discrete(3))
    model, actions = build_model(ModelConfig(), spec, seed=1), Actions(spec)
    mask = torch.tensor([[[0, 0, 0]], [[1, 0, 1]]], dtype=torch.int8)
    observation = {"action_mask": mask, "state": torch.randn(2, 1, 2)}
    inputs = ModelInput(observation, torch.zeros(2, 1), torch.zeros(2, 1).long(), torch.zeros(2, 1).bool())
    logits = model(inputs, torch.zeros(1, 0))[0].logits
    torch.testing.assert_close(logits[0, 0].softmax(-1), torch.full((3,), 1 / 3))
    for temperature, epsilon in ((1.0, 0.0), (0.0, 0.0), (2.0, 0.5), (1.0, 1.0)):
        explored = actions.explored(logits[0], torch.tensor([temperature]), torch.tensor([epsilon]))
        torch.testing.assert_close(explored[0].softmax(-1), torch.full((3,), 1 / 3))
    (actions.entropy(logits) + actions.log_prob(logits, torch.tensor([[1], [2]]))).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_masked_model_with_several_masks_obeys_the_first_and_sees_the_others() -> None:
    first, second = "a/action_mask", "b/action_mask"
    spec = EnvSpec({first: ArraySpec((3,), "int8"), second: ArraySpec((3,), "int8")}, discrete(3))
    model = build_model(ModelConfig(), spec, seed=1)

    def logits(mask: list[int], other: list[int]) -> Tensor:
        observation = {
            name: torch.tensor([[value]], dtype=torch.int8) for name, value in ((first, mask), (second, other))
        }
        inputs = ModelInput(observation, torch.zeros(1, 1), torch.zeros(1, 1).long(), torch.zeros(1, 1).bool())
        found: Tensor = model(inputs, torch.zeros(1, 0))[0].logits[0, 0]
        return found

    assert spec.mask == first
    assert (logits([1, 0, 1], [0, 1, 0]).softmax(-1) > 0).tolist() == [True, False, True]
    assert not torch.equal(logits([1, 1, 1], [0, 1, 0]), logits([1, 1, 1], [1, 1, 1]))


def test_model_of_a_dict_joins_what_each_network_makes_of_its_leaf() -> None:
    spec = EnvSpec(
        {"goal": ArraySpec((), "int64", values=4), "image": ArraySpec((7, 7, 3), "uint8")},
        discrete(3),
    )
    model = build_model(ModelConfig(layers=[16], gru=8), spec, seed=1)
    assert isinstance(model, ActorCritic)
    assert isinstance(model.encoder, Encoders)
    assert [type(encoder) for encoder in model.encoder.encoders] == [MlpEncoder, GridEncoder]
    assert model.encoder.size == 16 + 128
    assert model.core_size == 8


def test_build_run_model_stacks_frames_and_seeds_as_the_settings_say() -> None:
    config = LearnerConfig(env=EnvConfig(frame_stack=2), model=ModelConfig(layers=[8]), seed=3)
    model = build_run_model(config, make_spec((4,)))
    assert same(weights(model), weights(build_model(config.model, make_spec((8,)), seed=3)))


# Frames of images with their channels last


def test_frames_of_images_are_stacked_along_their_channels() -> None:
    def shapes(*shape: int) -> tuple[int, ...]:
        return ArraySpec(shape, "uint8").stacked(4).shape

    assert shapes(84, 84, 3) == (84, 84, 12)
    assert shapes(3, 84, 84) == (12, 84, 84)
    assert shapes(84, 84) == (336, 84)
    assert shapes(1, 84, 84) == (4, 84, 84)
    assert shapes(7) == (28,)
    assert shapes() == (4,)


@pytest.mark.parametrize("name", ["nature", "impala"])
def test_image_network_sees_the_same_stack_whichever_axis_has_the_channels(name: str) -> None:
    first, last = (make_spec(shape, "uint8") for shape in ((3, 40, 36), (40, 36, 3)))
    frames = torch.randint(256, (5, 4, 3, 40, 36), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    outputs = []
    for spec, given in ((first, frames), (last, frames.movedim(2, -1))):
        stack = stack_frames(given, spec.observations[0])
        assert stack.shape[1:] == spec.stacked(4).observations[0].shape
        outputs.append(build_model(ModelConfig(name=name), spec.stacked(4), seed=1).get_submodule("encoder")(stack))
    torch.testing.assert_close(*outputs)


def test_mask_of_three_axes_is_that_of_the_newest_frame() -> None:
    """A board [8, 8, 1] with a choice for each of its cells looks like an image with its channels last."""
    spec = EnvSpec({"action_mask": ArraySpec((8, 8, 1), "int8"), "state": ArraySpec((2,), "float32")}, discrete(64))
    frames = torch.zeros(3, 2, 8, 8, 1, dtype=torch.int8)
    frames[:, 0, 0, 0] = frames[:, 1, 5, 2] = 1
    observation = {
        "action_mask": stack_frames(frames, spec.observations[0]).unsqueeze(0),
        "state": torch.zeros(1, 3, 4),
    }
    inputs = ModelInput(observation, torch.zeros(1, 3), torch.zeros(1, 3).long(), torch.zeros(1, 3).bool())
    output, _ = build_model(ModelConfig(), spec.stacked(2), seed=1)(inputs, torch.zeros(3, 0))
    assert output.logits.argmax(dim=-1).tolist() == [[5 * 8 + 2] * 3]


# Layer normalisation.


@pytest.mark.parametrize("name", ["mlp", "nature", "impala"])
def test_layer_norm_features_do_not_follow_the_scale_of_weights(name: str) -> None:
    """The outputs of a layer are normalised before the activation, so that larger weights change nothing."""

    def features(layer_norm: bool, scale: float) -> Tensor:
        config = ModelConfig(name=name, layers=[16, 16], layer_norm=layer_norm, normalize=False)
        encoder = build_model(config, SPECS[name], seed=1).get_submodule("encoder")
        layers = [module for module in encoder.modules() if isinstance(module, nn.Linear)]
        with torch.no_grad():
            layers[-1].weight.mul_(scale)
            return encoder(model_input(SPECS[name], 1, 4).observation[0])

    torch.testing.assert_close(features(True, 10.0), features(True, 1.0), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(features(False, 10.0), features(False, 1.0), rtol=0.1)


def test_layer_norm_is_off_unless_asked_for_and_follows_every_layer() -> None:
    def norms(name: str, layer_norm: bool) -> int:
        model = build_model(ModelConfig(name=name, layers=[8, 8], layer_norm=layer_norm), SPECS[name], seed=1)
        return sum(isinstance(module, nn.LayerNorm | nn.GroupNorm) for module in model.modules())

    assert [norms(name, False) for name in ("mlp", "nature", "impala")] == [0, 0, 0]
    assert [norms(name, True) for name in ("mlp", "nature", "impala")] == [2, 4, 1]


def continuous(actions: int = 2) -> EnvSpec:
    bounds = (1.0,) * actions
    return EnvSpec(ArraySpec((3,), "float32"), ContinuousSpec(tuple(-b for b in bounds), bounds, (actions,)))


def test_values_of_continuous_tasks_share_nothing_with_the_policy() -> None:
    model = build_model(ModelConfig(), continuous(), seed=1)
    output, _ = model(model_input(make_spec((3,)), rows=4, batch=3), torch.zeros(3, 0))
    output.value.sum().backward()
    trained = {name.split(".")[0] for name, weight in model.named_parameters() if weight.grad is not None}
    assert trained == {"critic", "value_head"}


@pytest.mark.parametrize(
    ("config", "spec", "expected"),
    [
        (ModelConfig(), continuous(), True),
        (ModelConfig(separate=False), continuous(), False),
        (ModelConfig(lstm=LSTM), continuous(), False),
        (ModelConfig(gru=LSTM), continuous(), False),
        (ModelConfig(), SPECS["mlp"], False),
        (ModelConfig(separate=True), SPECS["mlp"], True),
        (ModelConfig(), EnvSpec(ArraySpec((2, 36, 36), "uint8"), continuous().action), False),
    ],
)
def test_own_network_of_values_follows_from_the_spaces_unless_it_is_set(
    config: ModelConfig, spec: EnvSpec, expected: bool
) -> None:
    model = build_model(config, spec, seed=1)
    assert isinstance(model, ActorCritic)
    assert (model.critic is not None) is expected


def test_own_network_of_values_is_refused_beside_a_memory() -> None:
    with pytest.raises(ConfigError, match="without a memory"):
        check(LearnerConfig(model=ModelConfig(separate=True, lstm=LSTM)))


def test_activation_follows_every_layer() -> None:
    model = build_model(ModelConfig(layers=[8, 8], activation=Activation.relu), make_spec((3,)), seed=1)
    assert sum(isinstance(module, nn.ReLU) for module in model.modules()) == 2
    assert not any(isinstance(module, nn.Tanh) for module in model.modules())


@pytest.mark.parametrize("state_std", [False, True])
def test_deviations_depend_on_the_observation_only_if_asked_for(state_std: bool) -> None:
    spec = continuous()
    model = build_model(ModelConfig(layers=[8], state_std=state_std), spec, seed=1)
    inputs = model_input(spec, 1, 5)
    output, _ = model(inputs, torch.zeros(5, 0))
    assert output.logits.shape == (1, 5, spec.policy_size)
    assert bool(output.logits[0, :, 2:].std(dim=0).gt(0).all()) is state_std
    assert output.logits[0, :, :2].std(dim=0).gt(0).all()


@pytest.mark.parametrize(
    "observation",
    [
        ArraySpec((3,), "float32"),
        ArraySpec((3, 40, 40), "uint8"),
        {"eye": ArraySpec((3, 40, 40), "uint8"), "joints": ArraySpec((2,), "float32")},
    ],
    ids=["vector", "image", "dict"],
)
@pytest.mark.parametrize("layers", [[], [8], [8, 6]])
def test_action_critic_values_actions_by_any_observation(observation: Any, layers: list[int]) -> None:
    spec = EnvSpec(observation, ContinuousSpec((-1.0, -1.0), (1.0, 1.0), (2,)))
    model = build_model(ModelConfig(layers=layers, normalize=False), spec, seed=1)
    assert isinstance(model, ActorCritic)
    assert model.action_critic is not None
    critic, twin = model.action_critic(), model.action_critic()
    inputs, action = sample_input(spec, 3, 5, torch.device("cpu")), torch.randn(3, 5, 2, requires_grad=True)
    value = critic(inputs.observation, action)
    assert value.shape == (3, 5)
    value.sum().backward()
    assert action.grad is not None
    assert action.grad.abs().sum() > 0
    assert not same(weights(critic), weights(twin))
    assert {id(each) for each in critic.parameters()}.isdisjoint(id(each) for each in model.parameters())
