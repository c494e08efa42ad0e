"""`seedrl run`: a learner and its actors as child processes of this machine, supervised. Knows nothing of torch."""

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seedrl.config import LearnerConfig, check
from seedrl.errors import ConfigError, Refused, SeedrlError
from seedrl.rundir import RunDirectory

POLL_SECONDS = 0.1
GOODBYE_SECONDS = 10.0
CRASH_SECONDS = 600.0  # crashes longer ago are forgotten
PR_SET_PDEATHSIG = 1
RETURN_SECONDS = 5.0  # from an actor's good end to its return, should the learner outlive it
# Exit codes of an actor that would only fail again in the same way.
HOPELESS: dict[int, type[SeedrlError]] = {error.exit_code: error for error in (ConfigError, Refused)}


class Supervisor:
    """Starts the processes, restarts crashed actors, and ends when the learner does. Owned by the main thread."""

    def __init__(self, config: LearnerConfig, overrides: Sequence[str]) -> None:
        check(config)
        self._config = config
        self._overrides = overrides
        self._run = RunDirectory.prepare(config)
        self._run.logs.mkdir(exist_ok=True)
        self._learner: subprocess.Popen[bytes] | None = None
        self._actors: dict[int, subprocess.Popen[bytes]] = {}
        self._restart_at: dict[int, float] = {}
        self._crashes: deque[float] = deque()  # when, of late
        self._signalled = False

    def run(self) -> None:
        """Returns when training is over; exits after a signal, or with the learner's code if it failed."""
        with tempfile.TemporaryDirectory(prefix="seedrl-") as private:
            address = f"unix:{private}/learner.sock"  # for its own actors, also if others come over the network
            self._forward_signals()
            try:
                self._learner = self._start_learner(address)
                for number in range(self._config.actors.count):
                    self._start_actor(number, address)
                code = self._supervise(address)
            finally:
                self._end_everything()
        if code or self._signalled:  # the latter ends a multirun, too
            raise SystemExit(code if code >= 0 else 128 - code)  # negative: ended by a signal

    def _supervise(self, address: str) -> int:
        assert self._learner is not None
        while (code := self._learner.poll()) is None:
            for number, actor in list(self._actors.items()):
                if actor.poll() is not None:
                    self._consider_restart(number, actor.returncode)
            for number, when in list(self._restart_at.items()):
                if time.monotonic() >= when:
                    self._start_actor(number, address)
            time.sleep(POLL_SECONDS)
        return code

    def _consider_restart(self, number: int, code: int) -> None:
        """Restarts a crashed actor after a while; gives up on one that cannot work."""
        del self._actors[number]
        if code == 0:  # it was told that training is over; if not, the learner is still there in a while
            self._restart_at[number] = time.monotonic() + RETURN_SECONDS
            return
        words = self._last_words(number)
        if code in HOPELESS:
            raise HOPELESS[code](f"actor {number} cannot run: {words}")
        now = time.monotonic()
        self._crashes.append(now)
        while self._crashes[0] < now - CRASH_SECONDS:
            self._crashes.popleft()
        if len(self._crashes) > self._config.actors.max_restarts:
            raise SeedrlError(
                f"actors crashed {len(self._crashes)} times within {CRASH_SECONDS / 60:.0f} minutes, "
                f"actors.max_restarts allows no more; last: {words}"
            )
        print(f"actor {number} ended with code {code} ({words}); restarting it", file=sys.stderr)
        self._restart_at[number] = now + min(5.0, 0.5 * len(self._crashes))

    def _start_learner(self, address: str) -> subprocess.Popen[bytes]:
        private = "socket" if self._config.listen else "listen"
        where = [f"run_dir={_quoted(str(self._run.path))}", f"{private}={_quoted(address)}"]
        return _start("seedrl", "learner", *self._overrides, *where)

    def _start_actor(self, number: int, address: str) -> None:
        self._restart_at.pop(number, None)
        settings = [f"learner={_quoted(address)}", f"name=actor-{number}", f"threads={self._config.actors.threads}"]
        settings.append(f"security.token_file={_quoted(self._config.security.token_file)}")  # SEEDRL_TOKEN is inherited
        with self._log(number).open("ab") as log:
            self._actors[number] = _start("envs_server", *settings, stdout=log, stderr=log)

    def _log(self, number: int) -> Path:
        return self._run.logs / f"actor-{number}.log"

    def _last_words(self, number: int) -> str:
        lines = self._log(number).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def _forward_signals(self) -> None:
        """A signal asks the learner to stop in order; a second one makes it end at once."""

        def forward(number: int, _: object) -> None:
            self._signalled = True
            if self._learner is not None and self._learner.poll() is None:
                self._learner.terminate()

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, forward)

    def _end_everything(self) -> None:
        """Whoever is still there is asked to end, and killed if it does not."""
        deadline = time.monotonic() + GOODBYE_SECONDS
        processes = [process for process in (self._learner, *self._actors.values()) if process is not None]
        if self._learner is not None and self._learner.poll() is None:
            self._learner.terminate()
        for actor in self._actors.values():
            if actor.poll() is None:
                actor.terminate()
        for process in processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _start(module: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """A child that gets no signals from the terminal, and SIGTERM should this process die."""
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, start_new_session=True, preexec_fn=end_with_parent, **options)


def end_with_parent() -> None:
    """For preexec_fn: the child gets SIGTERM should this process die."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):  # Linux
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _quoted(value: str) -> str:
    """As Hydra's grammar wants a string that may hold commas, spaces or equal signs."""
    escaped = value.replace("'", "\\'")
    return f"'{escaped}'"
