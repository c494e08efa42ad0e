"""Standard output and error whose reader may leave, as `head` does. Knows nothing of what is printed."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

CLOSED = 141  # the exit code that a shell gives to a program which SIGPIPE ended


class Output:
    """A stream that is dropped once nothing reads it, after one call of `on_closed`. As thread-safe as the stream."""

    def __init__(self, stream: TextIO, on_closed: Callable[[], None]) -> None:
        self._stream = stream
        self._on_closed = on_closed

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        """Write to nowhere from now on, also what is still in the buffer."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
        self._on_closed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def patient_output(lasting: str = "") -> Iterator[None]:
    """Let a lasting command, such as `run`, outlive the readers of its output; end others silently."""
    before = sys.stdout, sys.stderr
    sys.stdout = Output(sys.stdout, (lambda: _mention(lasting)) if lasting else _end)
    sys.stderr = Output(sys.stderr, _ignore if lasting else _end)
    try:
        yield
    finally:
        try:
            sys.stdout.flush()
        finally:
            sys.stdout, sys.stderr = before


def _mention(lasting: str) -> None:
    print(f"nothing reads the output any more; seedrl {lasting} continues without it", file=sys.stderr, flush=True)


def _ignore() -> None:
    """Have nothing to do: there is no other place to say it."""


def _end() -> None:
    raise SystemExit(CLOSED)
