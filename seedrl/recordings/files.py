"""The files of recorded unrolls: what they hold, and whether they are intact. Knows nothing of when they are written.

A recording is a directory with one folder for each process that recorded:

    rank-0/manifest.json            the environment, its spaces, the algorithm, and every shard with its sha256
    rank-0/unrolls-000000.safetensors   unrolls, as `Columns.read` returns them: [N, T+1, ...] each

A shard is written as a whole or not at all (places.py), and then the manifest is replaced.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import safetensors.torch
from safetensors import SafetensorError

from seedrl.errors import ConfigError
from seedrl.recordings.places import Place, replace
from seedrl.run.checkpoint import Tensors
from seedrl.specs import EnvSpec, decoded_spec

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Content:
    """The properties that all unrolls of a recording share."""

    env: str  # env.id
    spec: dict[str, Any]  # encoded
    unroll_length: int
    frame_stack: int


@dataclass(frozen=True, slots=True)
class Shard:
    name: str
    unrolls: int
    bytes: int
    sha256: str
    policy_versions: Sequence[int]  # the lowest and the highest


@dataclass
class Manifest:
    """Owned by the thread that writes it."""

    content: Content
    algorithm: str
    version: str  # of seedrl
    shards: list[Shard] = field(default_factory=list)
    format: int = FORMAT

    def write(self, directory: Place) -> None:
        replace(directory / MANIFEST, json.dumps(asdict(self), indent=1).encode())

    @classmethod
    def read(cls, directory: Place) -> "Manifest":
        """Read the manifest of one folder. Raises ConfigError if it cannot be used."""
        path = directory / MANIFEST
        try:
            read = json.loads(path.read_bytes())
            shards = [Shard(**shard) for shard in read["shards"]]
            manifest = cls(Content(**read["content"]), read["algorithm"], read["version"], shards, read["format"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{path} cannot be read: {error!r}") from error
        if manifest.format != FORMAT:
            raise ConfigError(f"{path} has format {manifest.format}; this version of seedrl reads {FORMAT}")
        return manifest


def write_shard(directory: Place, number: int, unrolls: Tensors) -> Shard:
    """Write unrolls to a file of their own."""
    name = f"unrolls-{number:06d}.safetensors"
    content = safetensors.torch.save(unrolls)
    replace(directory / name, content)
    versions = unrolls["policy_version"]
    return Shard(
        name,
        unrolls=len(versions),
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        policy_versions=(int(versions.min()), int(versions.max())),
    )


@dataclass(frozen=True, slots=True)
class Recording:
    """Recorded unrolls that can be trained on, whichever processes recorded them."""

    content: Content
    shards: list[tuple[Place, Shard]]  # oldest first

    @classmethod
    def open(cls, directory: Place) -> "Recording":
        """Find the unrolls of a recording and check every file. Raises ConfigError naming what cannot be used."""
        folders = sorted((path.parent for path in directory.glob(f"rank-*/{MANIFEST}")), key=str)
        manifests = [Manifest.read(folder) for folder in folders]
        shards = [(folder, shard) for folder, each in zip(folders, manifests, strict=True) for shard in each.shards]
        if not shards:
            raise ConfigError(f"source={directory} holds no recorded unrolls; store.dump=DIR records some")
        for folder, manifest in zip(folders, manifests, strict=True):
            if manifest.content != manifests[0].content:
                raise ConfigError(f"{folder} holds other unrolls than {folders[0]}: {manifest.content}")
        for folder, shard in shards:
            _check(folder / shard.name, shard)
        return cls(manifests[0].content, [(folder / shard.name, shard) for folder, shard in shards])

    @property
    def spec(self) -> EnvSpec:
        return decoded_spec(self.content.spec)

    @property
    def unrolls(self) -> int:
        return sum(shard.unrolls for _, shard in self.shards)


def load_shard(path: Place) -> Tensors:
    """Read the unrolls of a shard."""
    try:
        return safetensors.torch.load(path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _check(path: Place, shard: Shard) -> None:
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if digest != shard.sha256:
        raise ConfigError(f"{path} does not match its manifest: it is damaged, and nothing is trained on it")
