"""The end of a job, whichever engine ran it: its exit code, and what a user can do after a failure."""

import contextlib
import sys
from collections.abc import Iterator

from seedrl.config import RunConfig
from seedrl.errors import SeedrlError
from seedrl.launching.children import FATAL_CODES
from seedrl.run.closing import failed_words
from seedrl.run.directory import RunDirectory


@contextlib.contextmanager
def errors_explained(run: RunDirectory, config: RunConfig) -> Iterator[None]:
    """Add what a user can do to every error that ends a job."""
    try:
        yield
    except SeedrlError as error:
        if words := _after_failure(run, config, error.exit_code):
            error.add_note(words)
        raise


def exit_job(run: RunDirectory, config: RunConfig, code: int, is_interrupted: bool) -> None:
    """Exit with the learner's code if it failed, or after a signal, which ends a multirun, too; otherwise return."""
    if code and not is_interrupted and (words := _after_failure(run, config, code)):
        print(words, file=sys.stderr)
    if code or is_interrupted:
        raise SystemExit(code if code >= 0 else 128 - code)  # negative: ended by a signal


def _after_failure(run: RunDirectory, config: RunConfig, code: int) -> str:
    """Return what a user can do after a failure; nothing if the settings were refused and the run was never one."""
    if code in FATAL_CODES and run.discard_if_unused():
        return ""
    return failed_words(run, config)
