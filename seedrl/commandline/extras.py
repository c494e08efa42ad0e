"""Optional dependencies: what to install when a module is missing. Imports none of them."""

from collections.abc import Callable
from importlib.util import find_spec

from seedrl.errors import ConfigError

# Module → the extra of pyproject.toml that installs it.
EXTRAS = {
    **dict.fromkeys(("torch", "safetensors", "grpc_health", "grpc_reflection"), "learner"),
    "envpool": "actor",
    "ale_py": "ale",
    "gymnasium": "gymnasium",
    "fsspec": "remote",
    **dict.fromkeys(("msgpack", "websockets"), "openpi"),
    "cryptography": "certs",
    "matplotlib": "plot",
    "optuna": "optuna",
    "ray": "ray",
    **dict.fromkeys(("onnx", "onnxruntime", "onnxscript"), "onnx"),
    **dict.fromkeys(("imageio", "imageio_ffmpeg"), "video"),
    "huggingface_hub": "hub",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}


def explained(command: str, error: ModuleNotFoundError) -> ConfigError | None:
    """Return what to install for a command; None if the module is not one of seedrl's optional dependencies."""
    module = (error.name or "").partition(".")[0]
    return _missing(command, module) if module in EXTRAS else None


def refuse_without(module: str, command: str, find: Callable[[str], object] = find_spec) -> None:
    """Raise ConfigError if a module is not installed, without importing it."""
    try:
        found = find(module)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise _missing(command, module)


def _missing(command: str, module: str) -> ConfigError:
    return ConfigError(
        f"seedrl {command} needs {module}, which is not installed: pip install 'seedrl[{EXTRAS[module]}]'"
    )
