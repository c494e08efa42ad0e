"""Uploads what is worth sharing of a run to the Hugging Face hub. Knows nothing of what the files say."""

from pathlib import Path
from typing import Any

from seedrl.errors import ConfigError, SeedrlError
from seedrl.run import checkpoint as files

SHARED = ("config.yaml", "summary.json", "curve.png", "policy.pt2", "policy.onnx", "videos/*", "eval/*.json")


def upload_run(run_dir: Path, card: Path, repository: str, private: bool, client: Any = None) -> str:
    """Makes the repository if it is new, and puts the run there, its card as README.md; returns where."""
    client = client or _client()
    try:
        client.create_repo(repository, private=private, exist_ok=True)
        client.upload_folder(
            repo_id=repository,
            folder_path=str(run_dir),
            allow_patterns=[*SHARED, *_newest(run_dir)],
            commit_message="Upload a seedrl run",
        )
        where = client.upload_file(repo_id=repository, path_or_fileobj=str(card), path_in_repo="README.md")
    except Exception as error:  # the hub's own, and whatever the network raises
        raise SeedrlError(
            f"{repository} could not be uploaded: {error}; `hf auth login` tells the hub who you are"
        ) from error
    return str(getattr(where, "repo_url", "") or f"https://huggingface.co/{repository}")


def _newest(run_dir: Path) -> list[str]:
    found = files.found(run_dir / "checkpoints")
    return [f"checkpoints/{found[-1].name}/*"] if found else []


def _client() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ConfigError(f"upload= needs a package of its own: pip install 'seedrl[hub]' ({error})") from error
    return HfApi()
