"""`seedrl export`: writes a trained policy to one file that needs no seedrl.

The file is read back and compared with the model before it replaces another one. Knows nothing of training.
"""

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from seedrl.config import ExportConfig, Format
from seedrl.errors import ConfigError, SeedrlError
from seedrl.run.directory import plain
from seedrl.specs import as_tree
from seedrl.trained.check import TOLERANCE, Step, largest_difference, random_inputs
from seedrl.trained.load import Trained, load_trained
from seedrl.trained.step import StepInputs, StepOutputs, StepPolicy, flat
from seedrl.version import __version__

METADATA = "seedrl.json"  # a file inside the .pt2
METADATA_KEY = "seedrl"  # a property of the ONNX file
EXAMPLE_ROWS = 2  # torch.export would take one for a fixed size


def run_export(config: ExportConfig) -> None:
    trained = load_trained(config.run, config.checkpoint)
    file = FORMATS[config.format]
    out = Path(config.out) if config.out else trained.run_dir / f"policy{file.suffix}"
    if out.suffix != file.suffix:
        raise ConfigError(f"out={out} must end in {file.suffix} for format={config.format.name}")
    largest = export(trained, config.format, out)
    print(
        f"{out}: the policy of {trained.config.env.id} after {trained.env_steps:,} steps, {trained.spec}; "
        f"read back, its outputs differ from the model's by at most {largest:.1e}"
    )


def export(trained: Trained, kind: Format, out: Path) -> float:
    """Write the file and return its largest difference from the model; leave no file if that is too large."""
    file = FORMATS[kind]
    temporary = out.with_name(f".{out.name}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _torch_silent():
            _write(file, trained, temporary)
            largest = largest_difference(trained.policy, file.read(trained.policy, temporary))
        if largest > TOLERANCE:
            raise SeedrlError(f"the exported policy differs from the model by {largest:.1e}, more than {TOLERANCE:.0e}")
        temporary.replace(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}; give another file as out=") from error
    finally:
        temporary.unlink(missing_ok=True)
    return largest


@contextmanager
def _torch_silent() -> Iterator[None]:
    """Silence torch and the packages it translates with: their warnings here are about their own internals."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _write(file: "File", trained: Trained, path: Path) -> None:
    try:
        with torch.no_grad():  # else it would gather statistics and auxiliary losses
            file.write(trained.policy, json.dumps(metadata(trained)), path)
    except (OSError, SeedrlError):
        raise
    except Exception as error:  # torch may raise anything for a user's own model
        reason = (str(error) or repr(error)).splitlines()[0]
        raise ConfigError(f"model.name={trained.config.model.name} cannot be exported: {reason}") from error


def metadata(trained: Trained) -> dict[str, Any]:
    """Describe the policy inside the file: environment, spaces, every input and output, settings of the run."""
    policy, config = trained.policy, trained.config
    inputs = random_inputs(policy, EXAMPLE_ROWS, seed=0)
    return {
        "version": __version__,
        "env": config.env.id,
        "env_steps": trained.env_steps,
        "frame_stack": config.env.frame_stack,
        "core_size": policy.core_size,
        "spec": trained.state["spec"],
        "inputs": _described(inputs._asdict()),
        "outputs": _described(policy.step(inputs)._asdict()),
        "config": plain(config),
    }


def _described(tensors: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": ["batch", *tensor.shape[1:]]}
        for name, tensor in flat(tensors).items()
    }


# torch.export


def write_torch(policy: StepPolicy, words: str, path: Path) -> None:
    inputs = random_inputs(policy, EXAMPLE_ROWS, seed=0)._asdict()
    with torch.no_grad():
        program = torch.export.export(policy, (), inputs, dynamic_shapes=_dynamic(inputs))
    program.example_inputs = None  # nothing else in the file would be pickled
    torch.export.save(program, path, extra_files={METADATA: words})


def read_torch(policy: StepPolicy, path: Path) -> Step:
    module = torch.export.load(path).module()

    def step(inputs: StepInputs) -> StepOutputs:
        with torch.no_grad():
            return StepOutputs(**module(**inputs._asdict()))

    return step


def _dynamic(inputs: dict[str, Any]) -> dict[str, Any]:
    """Declare the first axis of every tensor to be the batch, of any size."""
    batch = torch.export.Dim("batch")
    return {
        name: {leaf: {0: batch} for leaf in tree} if isinstance(tree, dict) else {0: batch}
        for name, tree in inputs.items()
    }


# ONNX


def write_onnx(policy: StepPolicy, words: str, path: Path) -> None:
    _onnx_packages()
    inputs = random_inputs(policy, EXAMPLE_ROWS, seed=0)
    program = torch.onnx.export(
        policy,
        (),
        kwargs=inputs._asdict(),
        input_names=list(flat(inputs._asdict())),
        output_names=list(flat(policy.step(inputs)._asdict())),
        dynamic_shapes=_dynamic(inputs._asdict()),
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props[METADATA_KEY] = words
    program.save(path, external_data=False)


def read_onnx(policy: StepPolicy, path: Path) -> Step:
    onnx, onnxruntime = _onnx_packages()
    onnx.checker.check_model(path, full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def step(inputs: StepInputs) -> StepOutputs:
        arrays = {name: tensor.numpy() for name, tensor in flat(inputs._asdict()).items()}
        wanted = [output.name for output in session.get_outputs()]
        found = dict(zip(wanted, map(torch.from_numpy, session.run(wanted, arrays)), strict=True))
        return StepOutputs(
            as_tree(policy.spec.action, [tensor for name, tensor in found.items() if name.startswith("action")]),
            *(found[name] for name in StepOutputs._fields[1:]),
        )

    return step


def _onnx_packages() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 torch translates with it
    except ImportError as error:
        raise ConfigError(f"format=onnx needs more packages: pip install 'seedrl[onnx]' ({error})") from error
    return onnx, onnxruntime


@dataclass(frozen=True, slots=True)
class File:
    """A format: its suffix, and how a policy is written and read back."""

    suffix: str
    write: Callable[[StepPolicy, str, Path], None]
    read: Callable[[StepPolicy, Path], Step]


FORMATS = {Format.torch: File(".pt2", write_torch, read_torch), Format.onnx: File(".onnx", write_onnx, read_onnx)}
