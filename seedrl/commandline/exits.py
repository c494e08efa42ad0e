"""The end of a command that failed: one line, a traceback if the code is foreign, and an exit code."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from seedrl.commandline.extras import explained
from seedrl.errors import SeedrlError
from seedrl.run.identity import identity
from seedrl.tracebacks import failed, report


@contextmanager
def errors_as_exit_codes(name: str) -> Iterator[None]:
    """End the process with one line, the traceback of foreign code if there is one, and an exit code."""
    try:
        yield
    except ModuleNotFoundError as error:
        _exit_with(name, explained(name, error) or failed(SeedrlError, "it failed", error))
    except SeedrlError as error:
        _exit_with(name, error)
    except BrokenPipeError:
        raise
    except Exception as error:
        _exit_with(name, failed(SeedrlError, "it failed", error))


def _exit_with(name: str, error: SeedrlError) -> NoReturn:
    from seedrl.launching.torchrun import write_error_file

    print(f"seedrl {identity(name)}: {report(error)}", file=sys.stderr)
    write_error_file(str(error), error.exit_code)
    raise SystemExit(error.exit_code) from error
