"""Uploads the files of a run that are worth sharing to the Hugging Face hub. Knows nothing of their contents."""

from pathlib import Path
from typing import Any

from seedrl.errors import ConfigError, SeedrlError
from seedrl.run import checkpoint as files

SHARED = ("config.yaml", "summary.json", "curve.png", "policy.pt2", "policy.onnx", "videos/*", "eval/*.json")


def upload_run(run_dir: Path, card: Path, repository: str, private: bool, client: Any = None) -> str:
    """Upload the run, its card as README.md, to a repository that is made if it does not exist; return its address."""
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
    except Exception as error:  # errors of the hub and of the network have no common base class
        raise SeedrlError(f"{repository} could not be uploaded: {error}; log in with `hf auth login` first") from error
    return str(getattr(where, "repo_url", "") or f"https://huggingface.co/{repository}")


def _newest(run_dir: Path) -> list[str]:
    found = files.found(run_dir / "checkpoints")
    return [f"checkpoints/{found[-1].name}/*"] if found else []


def _client() -> Any:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise ConfigError(f"upload= needs one more package: pip install 'seedrl[hub]' ({error})") from error
    return HfApi()
