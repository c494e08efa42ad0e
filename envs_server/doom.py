"""A working directory for ViZDoom's engines, which leave `_vizdoom.ini` and `_vizdoom/` wherever they are started.

envpool starts an engine per environment with `vzd_path`; here that is a script which first changes into a temporary
directory. Knows nothing of pools.
"""

import shlex
import shutil
import tempfile
import weakref
from pathlib import Path


class EngineDirectory:
    """A temporary directory with the script in it. Owned by the pool that starts the engines."""

    def __init__(self, engine: str) -> None:
        path = tempfile.mkdtemp(prefix="seedrl-doom-")
        self.remove = weakref.finalize(self, shutil.rmtree, path, ignore_errors=True)  # at the latest at exit
        script = Path(path) / "vizdoom"
        script.write_text(f'#!/bin/sh\ncd {shlex.quote(path)} && exec {shlex.quote(engine)} "$@"\n')
        script.chmod(0o700)
        self.vzd_path = str(script)
