"""Policies as files: every kind of space and network, written, read back, and compared with the model."""

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from seedrl import __version__
from seedrl.config import EnvConfig, ExportConfig, Format, ModelConfig
from seedrl.errors import ConfigError, SeedrlError
from seedrl.models.base import FORBIDDEN
from seedrl.run.directory import plain
from seedrl.specs import ArraySpec, CategoricalSpec, ContinuousSpec, EnvSpec, discrete
from seedrl.trained.check import TOLERANCE, random_inputs
from seedrl.trained.export import FORMATS, METADATA, METADATA_KEY, export, read_onnx, run_export
from seedrl.trained.load import Trained, load_trained
from seedrl.types import ModelInput, ModelOutput
from tests.fakes import AuxModel, make_spec
from tests.test_contracts import ROOT
from tests.trained_runs import CARTPOLE, leave_trained, make_trained

INFINITY = float("inf")
IMAGE = ArraySpec((1, 40, 40), "uint8")
TREE = {
    "action_mask": ArraySpec((8,), "int8"),
    "camera/left": ArraySpec((3, 40, 40), "uint8"),
    "goal": ArraySpec((), "int64", values=3),
    "joints": ArraySpec((4,), "float64"),
    "touches": ArraySpec((2,), "bool"),
}
ACTIONS = {"jump": discrete(3), "keys": CategoricalSpec((2, 3), (2,)), "move": ContinuousSpec((-1.0,), (1.0,), (1,))}
CASES: dict[str, tuple[EnvSpec, ModelConfig, int]] = {  # spaces, network, frames stacked
    "mlp": (CARTPOLE, ModelConfig(layers=[8]), 1),
    "lstm": (CARTPOLE, ModelConfig(layers=[8], lstm=6), 1),
    "normalised-box": (
        EnvSpec(ArraySpec((5,), "float64"), ContinuousSpec((-2.0, 0.0, -INFINITY), (2.0, 10.0, INFINITY), (3,))),
        ModelConfig(layers=[8], normalize=True),
        3,
    ),
    "gru-squashed-box": (
        EnvSpec(ArraySpec((5,), "float32"), ContinuousSpec((-2.0, 0.0), (2.0, 10.0), (2,))),
        ModelConfig(layers=[8], gru=6, squash=True),
        1,
    ),
    "nature-stacked": (EnvSpec(IMAGE, discrete(6)), ModelConfig(name="nature"), 4),
    "impala": (EnvSpec(IMAGE, discrete(6)), ModelConfig(name="impala"), 1),
    "grid-choices": (EnvSpec(ArraySpec((7, 7, 3), "uint8"), CategoricalSpec((3, 3, 2), (3,))), ModelConfig(lstm=6), 1),
    "category": (EnvSpec(ArraySpec((), "int64", values=6), discrete(4)), ModelConfig(layers=[8]), 1),
    "dict-masked": (EnvSpec(TREE, ACTIONS), ModelConfig(layers=[8], gru=6), 2),  # type: ignore[arg-type]
    "tiny": (EnvSpec(IMAGE, discrete(4)), ModelConfig(name="tiny"), 1),
}


EXPORTED = "dict-masked"  # it has something of everything


def trained_case(tmp_path: Path, case: str) -> Trained:
    spec, model, stack = CASES[case]
    return make_trained(tmp_path / "run", spec, EnvConfig(frame_stack=stack), model)


def cases() -> Iterator[Any]:
    """Yield every case in both formats. ONNX takes seconds each: `exported` is the case that every run compares."""
    for case in (case for case in CASES if case != EXPORTED):
        yield pytest.param(case, Format.torch, id=f"{case}-torch")
        yield pytest.param(case, Format.onnx, id=f"{case}-onnx", marks=pytest.mark.slow)


@pytest.mark.parametrize(("case", "kind"), list(cases()))
def test_export_read_back_equals_the_model(tmp_path: Path, case: str, kind: Format) -> None:
    trained = trained_case(tmp_path, case)
    out = tmp_path / f"policy{FORMATS[kind].suffix}"
    largest = export(trained, kind, out)
    assert largest <= (0.0 if kind is Format.torch else TOLERANCE)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [out.name]


def test_step_of_the_policy_equals_inference_on_the_same_rows(tmp_path: Path) -> None:
    """The outputs are those of the model, with the most likely action within its bounds."""
    policy = trained_case(tmp_path, "gru-squashed-box").policy
    inputs = random_inputs(policy, rows=5, seed=1)
    found = policy.step(inputs)
    with torch.inference_mode():
        output, core_state = policy.model(
            ModelInput(*inputs[:4]).tree_map(lambda leaf: leaf.unsqueeze(0)), inputs.core_state
        )
    assert torch.equal(found.logits, output.logits[0])
    assert torch.equal(found.value, output.value[0])
    assert torch.equal(found.next_core_state, core_state)
    assert torch.equal(found.next_last_action, output.logits[0, :, :2])  # means
    bounded = policy.actions.to_env(found.next_last_action.numpy())
    assert isinstance(found.action, Tensor)
    np.testing.assert_allclose(found.action, bounded, rtol=1e-6)  # type: ignore[arg-type]


def session_of(path: Path) -> Any:
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


class Exported(NamedTuple):
    """A policy of many leaves with its files, made once."""

    trained: Trained
    files: dict[Format, Path]
    largest: dict[Format, float]  # difference from the model's own outputs


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    directory = tmp_path_factory.mktemp("exported")
    trained = trained_case(directory, EXPORTED)
    files = {kind: directory / f"policy{FORMATS[kind].suffix}" for kind in Format}
    largest = {kind: export(trained, kind, path) for kind, path in files.items()}
    return Exported(trained, files, largest)


@pytest.mark.long
def test_export_as_onnx_never_chooses_what_is_forbidden(exported: Exported) -> None:
    trained = exported.trained
    inputs = random_inputs(trained.policy, rows=5, seed=1)
    assert isinstance(inputs.observation, dict)
    inputs.observation["action_mask"][:] = torch.tensor([0, 0, 1, 0, 1, 0, 1, 0] * 2)  # two frames
    found = read_onnx(trained.policy, exported.files[Format.onnx])(inputs)
    assert isinstance(found.action, dict)
    assert found.action["jump"].tolist() == [2] * 5
    assert found.action["keys"].tolist() == [[1, 1]] * 5
    assert (found.logits[:, [0, 1, 3, 5, 7]] == FORBIDDEN).all()


@pytest.mark.parametrize("kind", list(Format), ids=lambda kind: kind.name)
def test_export_carries_what_it_is(exported: Exported, kind: Format) -> None:
    trained, out = exported.trained, exported.files[kind]
    assert exported.largest[kind] <= (0.0 if kind is Format.torch else TOLERANCE)
    if kind is Format.torch:
        extra = {METADATA: ""}
        torch.export.load(out, extra_files=extra)
        words = extra[METADATA]
    else:
        words = session_of(out).get_modelmeta().custom_metadata_map[METADATA_KEY]
    found = json.loads(words)
    assert (found["version"], found["env"], found["env_steps"]) == (__version__, "CartPole-v1", 100)
    assert (found["frame_stack"], found["core_size"]) == (2, 6)
    assert found["config"] == plain(trained.config)
    assert found["inputs"]["observation/camera/left"] == {"dtype": "uint8", "shape": ["batch", 6, 40, 40]}
    assert found["outputs"]["action/keys"] == {"dtype": "int32", "shape": ["batch", 2]}


def test_export_as_onnx_has_named_inputs_and_outputs_with_a_batch_of_any_size(exported: Exported) -> None:
    session = session_of(exported.files[Format.onnx])
    assert {each.name: each.shape for each in session.get_inputs()} == {
        "observation/action_mask": ["batch", 16],
        "observation/camera/left": ["batch", 6, 40, 40],
        "observation/goal": ["batch", 2],
        "observation/joints": ["batch", 8],
        "observation/touches": ["batch", 4],
        "reward": ["batch"],
        "last_action": ["batch", 4],
        "reset": ["batch"],
        "core_state": ["batch", 6],
    }
    assert [each.name for each in session.get_outputs()] == [
        *("action/jump", "action/keys", "action/move"),
        *("logits", "value", "next_core_state", "next_last_action"),
    ]


def test_export_for_torch_holds_no_pickle(exported: Exported) -> None:
    with zipfile.ZipFile(exported.files[Format.torch]) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    configs = [json.loads(content) for name, content in contents.items() if name.endswith("_config.json")]
    assert configs
    assert not any(entry["use_pickle"] for config in configs for entry in config["config"].values())
    assert [name for name, content in contents.items() if name.endswith((".pkl", ".pt")) and content] == []


# What goes wrong


def test_export_that_differs_from_the_model_fails_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = trained_case(tmp_path, "mlp")
    other = make_trained(tmp_path / "other", seed=2)
    honest = FORMATS[Format.torch]

    def write(policy: Any, words: str, path: Path) -> None:
        honest.write(other.policy, words, path)

    monkeypatch.setitem(FORMATS, Format.torch, type(honest)(honest.suffix, write, honest.read))
    (tmp_path / "policy.pt2").write_text("what was there before")
    with pytest.raises(SeedrlError, match="differs from the model by"):
        export(trained, Format.torch, tmp_path / "policy.pt2")
    assert (tmp_path / "policy.pt2").read_text() == "what was there before"
    assert not (tmp_path / ".policy.pt2").exists()


def test_export_that_does_not_choose_the_most_likely_action_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = trained_case(tmp_path, "mlp")
    honest = FORMATS[Format.torch]

    def read(policy: Any, path: Path) -> Any:
        step = honest.read(policy, path)
        return lambda inputs: (found := step(inputs))._replace(action=1 - found.action)

    monkeypatch.setitem(FORMATS, Format.torch, type(honest)(honest.suffix, honest.write, read))
    with pytest.raises(SeedrlError, match="action of the exported policy is not the most likely one"):
        export(trained, Format.torch, tmp_path / "policy.pt2")


@pytest.mark.parametrize("kind", list(Format))
def test_export_leaves_auxiliary_losses_out(kind: Format, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model computes them only while gradients are enabled, which they never are here."""
    trained = make_trained(tmp_path / "run", model=ModelConfig(name="tests.fakes:AuxModel"))
    monkeypatch.setattr(AuxModel, "predicted", None)  # it would be called if they were computed
    export(trained, kind, tmp_path / f"policy{FORMATS[kind].suffix}")


class Branching(nn.Module):
    """What it does depends on what it sees, which no graph can hold."""

    core_size = 0

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: ModelInput, core_state: Tensor) -> tuple[ModelOutput, Tensor]:
        assert isinstance(inputs.observation, Tensor)
        heads = self.linear(inputs.observation if inputs.reward.sum().item() > 0 else -inputs.observation)
        return ModelOutput(heads[..., :2], heads[..., 2]), core_state


def test_export_of_a_model_that_is_no_graph_says_so(tmp_path: Path) -> None:
    trained = make_trained(tmp_path / "run", model=ModelConfig(name="tests.test_export:Branching"))
    with pytest.raises(ConfigError, match=r"tests\.test_export:Branching cannot be exported: "):
        export(trained, Format.torch, tmp_path / "policy.pt2")


def test_export_without_its_packages_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"pip install 'seedrl\[onnx\]'"):
        export(trained_case(tmp_path, "mlp"), Format.onnx, tmp_path / "policy.onnx")


# The command


def test_export_command_writes_into_the_run_directory_and_says_how_near_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = leave_trained(tmp_path / "run")
    run_export(ExportConfig(run=str(run_dir)))
    assert (run_dir / "policy.pt2").is_file()
    assert "differ from the model's by at most 0.0e+00" in capsys.readouterr().out


def test_export_command_refuses_a_file_with_another_ending(tmp_path: Path) -> None:
    run_dir = leave_trained(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"must end in \.onnx for format=onnx"):
        run_export(ExportConfig(run=str(run_dir), format=Format.onnx, out="policy.pt2"))


# Which checkpoint


def test_trained_policy_is_the_newest_the_best_or_the_one_that_is_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for steps, score in ((100, 5.0), (200, 50.0), (300, None)):
        leave_trained(run_dir, steps=steps, score=score)
    assert load_trained(str(run_dir)).env_steps == 300
    assert load_trained(str(run_dir), "best").env_steps == 200
    assert load_trained(str(run_dir), "000000000100").env_steps == 100
    assert load_trained(str(run_dir), str(run_dir / "checkpoints/000000000100")).env_steps == 100


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("best", "no checkpoint in .* has a score"),
        ("nothing", "neither a checkpoint's directory nor one of newest, best"),
    ],
)
def test_trained_policy_that_is_not_there_is_said(tmp_path: Path, which: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_trained(str(leave_trained(tmp_path / "run")), which)


def test_trained_policy_keeps_every_setting_of_the_run(tmp_path: Path) -> None:
    trained = make_trained(tmp_path / "run", make_spec((4,)), EnvConfig(id="Other-v0", options={"a": 1}, frame_stack=2))
    assert trained.config.env == EnvConfig(id="Other-v0", options={"a": 1}, frame_stack=2)
    assert plain(trained.config)["algorithm"]["optimizer"] == "adam"


# The documentation


@pytest.mark.long
def test_documented_use_of_an_exported_policy_works(tmp_path: Path) -> None:
    """Every Python block of the page, word for word, where the files are that the commands before it write."""
    trained = make_trained(tmp_path / "run", env=EnvConfig(id="CartPole-v1"))
    for kind in Format:
        export(trained, kind, tmp_path / f"policy{FORMATS[kind].suffix}")
    text = (ROOT / "docs/after-training.md").read_text()
    blocks = [block.partition("```")[0] for block in text.split("```python\n")[1:]]
    assert len(blocks) == 2
    for block in blocks:
        done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert float(done.stdout.split()[-1]) >= 8  # what an untrained policy gets, too
