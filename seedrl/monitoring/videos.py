"""Videos during a run: at intervals a process of low priority records the newest checkpoint. Nothing waits for it."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from seedrl.launching.children import Process, start_module
from seedrl.launching.overrides import override
from seedrl.monitoring.sampler import Row

LOWEST = 19  # priority
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
END_SECONDS = 2.0


class Videos:
    """A sink that ignores the measurements: every row is a chance to start a video. Owned by the main thread."""

    name = "a video"

    def __init__(
        self,
        run_dir: Path,
        seconds: float,
        start: Callable[..., Process] = start_module,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir = run_dir
        self._seconds = seconds
        self._start = start
        self._clock = clock
        self._begun = clock()
        self._process: Process | None = None

    def write(self, row: Row) -> None:
        """Start a video if one is due. Raise RuntimeError with the last line of its log if the previous one failed."""
        if self._process is not None:
            if (code := self._process.poll()) is None:
                return
            self._process = None
            if code:
                raise RuntimeError(self._last_words() or f"seedrl record ended with code {code}")
        if self._clock() - self._begun >= self._seconds and any(self._run_dir.glob("checkpoints/[0-9]*")):
            self._begun = self._clock()
            self._process = self._film()

    def close(self, summary: Row) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)

    def _film(self) -> Process:
        with self._log.open("wb") as log:
            process = self._start(
                "seedrl",
                "record",
                override("run", str(self._run_dir)),
                stdout=log,
                stderr=log,
                env={**os.environ, **ONE_THREAD},
            )
        os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST)
        return process

    @property
    def _log(self) -> Path:
        logs = self._run_dir / "logs"
        logs.mkdir(exist_ok=True)
        return logs / "video.log"

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
