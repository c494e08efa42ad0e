"""Describes errors of code that is not seedrl's: the user's file and line first, what was raised, and the traceback.

Every place where a thread or a process ends because of the user's own code goes through `failed`. Knows no model,
environment or algorithm, and prints nothing.
"""

import os
import sysconfig
import traceback
from collections.abc import Iterator
from typing import Any

from seedrl.errors import SeedrlError

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_OURS = (_PACKAGE, os.path.join(os.path.dirname(_PACKAGE), "envs_server"))
_PYTHONS = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_INSTALLED = ("site-packages", "dist-packages")


def failed(kind: type[SeedrlError], what: str, error: BaseException) -> SeedrlError:
    """Return the error of this kind to raise for an error of foreign code; return errors of seedrl's own unchanged.

    Its message is one line: the innermost place in the user's own code, then what has failed and what was raised.
    """
    if isinstance(error, SeedrlError):
        return error
    place = place_of(error)
    failure = kind(f"{place}: {what}: {error!r}" if place else f"{what}: {error!r}")
    failure.__cause__ = error
    if not is_of_the_call(error):
        failure.traceback = "".join(traceback.format_exception(error)).rstrip()
    return failure


def place_of(error: BaseException) -> str:
    """Return the innermost place in the user's own code that an error comes from; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return f"{_shown(error.filename)}:{error.lineno}"
    for each in _chain(error):
        frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(each.__traceback__)]
        for code, line in reversed(frames):
            if _is_users(code.co_filename):
                return f"{_shown(code.co_filename)}:{line} in {code.co_name}"
    return ""


def place_of_code(function: Any) -> str:
    """Return where a function is defined; empty if that is not in the user's own code."""
    code = getattr(function, "__code__", None)
    if code is None or not _is_users(code.co_filename):
        return ""
    return f"{_shown(code.co_filename)}:{code.co_firstlineno} in {code.co_name}"


def is_of_the_call(error: BaseException) -> bool:
    """Return whether the call itself failed, as with wrong arguments, and no line of what was called has run."""
    return error.__traceback__ is None or error.__traceback__.tb_next is None


def report(error: BaseException) -> str:
    """Return an error as people should see it: its message, the traceback of the user's own code, and its notes."""
    own = failed(SeedrlError, type(error).__name__, error)
    return "\n".join([str(own), *([own.traceback] if own.traceback else []), *getattr(error, "__notes__", ())])


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it follows from."""
    following: BaseException | None = error
    seen: set[int] = set()
    while following is not None and id(following) not in seen:
        yield following
        seen.add(id(following))
        following = following.__cause__ or following.__context__


def _is_users(path: str) -> bool:
    """Return whether a file is neither seedrl's, nor Python's, nor an installed package's."""
    if path.startswith("<"):
        return False
    path = os.path.abspath(path)
    if any(path.startswith(directory + os.sep) for directory in (*_OURS, *_PYTHONS)):
        return False
    return not any(part in _INSTALLED for part in path.split(os.sep))


def _shown(path: str) -> str:
    """Return a path relative to the working directory if it lies there."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative
