"""The tokens that actors show and a learner expects, as its file holds them now. Knows nothing of gRPC.

A token never appears in a log line, an exception or a repr.
"""

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

from seedrl.config import TOKEN_VARIABLE, SecurityConfig
from seedrl.errors import ConfigError

MIN_LENGTH = 16  # what cannot be guessed
MAX_LENGTH = 512  # what fits a request's metadata
MAX_BYTES = 65536  # of a token file

_TOKEN = re.compile(r"[!-~]+")  # visible ASCII, as metadata can hold it


class Tokens:
    """Follows its file: a change takes effect with the next call. Owned by one thread."""

    def __init__(self, security: SecurityConfig, say: Callable[[str], None] = lambda _: None) -> None:
        self._path = security.token_file
        self._say = say
        self._seen = self._signature() if self._path else None
        self._tokens = self._read() if self._path else _from_environment()

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def first(self) -> str:
        """Return the token to show; empty for none."""
        self._follow()
        return self._tokens[0] if self._tokens else ""

    def accepts(self, shown: str) -> bool:
        """Return whether a token is valid. Takes the same time for every wrong one, however much of it is right."""
        self._follow()
        digest = _digest(shown)
        return sum([hmac.compare_digest(digest, _digest(token)) for token in self._tokens]) > 0

    def _follow(self) -> None:
        """Read the file again if it has changed. A file that cannot be used, such as half of one, changes nothing."""
        if self._path and (signature := self._signature()) != self._seen:
            self._seen = signature
            try:
                self._tokens = self._read()
            except ConfigError as error:
                self._say(f"{error}; the tokens it held before stay valid")

    def _signature(self) -> tuple[int, ...] | None:
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    def _read(self) -> tuple[str, ...]:
        where = f"security.token_file={self._path}"
        try:
            with open(self._path, "rb") as file:
                content = file.read(MAX_BYTES).decode("ascii")
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError:
            raise ConfigError(f"{where} must hold tokens of visible ASCII characters, one a line") from None
        return _checked([line.strip() for line in content.splitlines() if line.strip()], where)


def _from_environment() -> tuple[str, ...]:
    token = os.environ.get(TOKEN_VARIABLE, "")
    return _checked([token], TOKEN_VARIABLE) if token else ()


def _checked(tokens: list[str], where: str) -> tuple[str, ...]:
    """Return the tokens. Raises ConfigError that says what is wrong with a token, never what the token is."""
    if not tokens:
        raise ConfigError(f"{where} holds no token; `seedrl certs` makes one")
    for number, token in enumerate(tokens, 1):
        if not _TOKEN.fullmatch(token):
            raise ConfigError(f"{where}: token {number} must hold nothing but visible ASCII characters")
        if not MIN_LENGTH <= len(token) <= MAX_LENGTH:
            raise ConfigError(
                f"{where}: token {number} has {len(token)} characters, expected {MIN_LENGTH} to {MAX_LENGTH}; "
                "`seedrl certs` makes a good one"
            )
    return tuple(tokens)


def _digest(token: str) -> bytes:
    """Return a digest, whose length tells nothing of the token."""
    return hashlib.sha256(token.encode(errors="backslashreplace")).digest()


def open_to_others(security: SecurityConfig) -> list[str]:
    """Return the files with secrets that other users of this machine may read."""
    private = [Path(name) for name in (security.key_file, security.token_file) if name]
    return [str(path) for path in private if path.exists() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)]
