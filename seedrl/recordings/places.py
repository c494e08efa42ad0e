"""Directories of recordings: on this machine, or wherever fsspec finds them by a URL. Knows nothing of what is in them.

A path on this machine is a `Path` and needs nothing. `s3://bucket/folder` and the like need fsspec, and for most kinds
another package besides, such as s3fs; a `RemotePath` has those methods of a `Path` that recordings use.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seedrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RemotePath:
    """Thread-safe, as fsspec is."""

    filesystem: Any  # fsspec's
    path: str  # as the file system has it
    url: str  # as people have it

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.filesystem, f"{self.path.rstrip('/')}/{name}", f"{self.url.rstrip('/')}/{name}")

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.filesystem, self.path.rpartition("/")[0], self.url.rpartition("/")[0])

    def glob(self, pattern: str) -> list["RemotePath"]:
        start = f"{self.path.rstrip('/')}/"
        return [self / found.removeprefix(start) for found in self.filesystem.glob(start + pattern)]

    def exists(self) -> bool:
        return bool(self.filesystem.exists(self.path))

    def mkdir(self, parents: bool, exist_ok: bool) -> None:
        self.filesystem.makedirs(self.path, exist_ok=exist_ok)

    def read_bytes(self) -> bytes:
        content: bytes = self.filesystem.cat_file(self.path)
        return content

    def unlink(self) -> None:
        self.filesystem.rm_file(self.path)


Place = Path | RemotePath


def place_of(setting: str, text: str) -> Place:
    """Return the place that a setting names by a path or a URL. Raises ConfigError if nothing here can open it."""
    if "://" not in text:
        return Path(text)
    try:
        from fsspec.core import url_to_fs

        filesystem, path = url_to_fs(text)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "fsspec":
            raise ConfigError(f"{setting}={text} cannot be opened: {error}") from error
        raise ConfigError(
            f"{setting}={text} needs fsspec, which is not installed: pip install 'seedrl[remote]'; a path on this "
            "machine does not need it"
        ) from error
    except (ImportError, ValueError) as error:  # of a package that fsspec needs for it; of a kind that nobody knows
        raise ConfigError(f"{setting}={text} cannot be opened: {error}") from error
    return RemotePath(filesystem, path, text.rstrip("/"))


def replace(place: Place, content: bytes) -> None:
    """Write a file so that it is there as a whole or not at all; stores of objects write no other way."""
    if isinstance(place, RemotePath):
        place.filesystem.pipe_file(place.path, content)
        return
    temporary = place.with_name(f".{place.name}")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(place)
