"""The end of a process that was a rank. Knows nothing of what it did.

Rarely a rank was aborted after its work was done and saved (SIGABRT, "terminate called without an active exception").
The likely cause is that gloo's threads outlive `destroy_process_group` and drop tensors that Python knows while the
interpreter is torn down (https://github.com/pytorch/pytorch/issues/190489). So a rank ends without tearing it down.
"""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ending_at_once() -> Iterator[None]:
    """End the process after the block, with the exit code that it would have, but without tearing down Python."""
    code = 0
    try:
        yield
    except SystemExit as end:
        code = _code_of(end)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _code_of(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1
