"""`seedrl observe`: starts a Prometheus that watches learners and draws the console.

Knows nothing of a learner but its address; configuration, rules and console are those of conf/observability.
"""

import http.client
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from seedrl.config import ObserveConfig
from seedrl.errors import ConfigError, SeedrlError
from seedrl.launching.children import end_with_parent
from seedrl.monitoring.endpoint import address_of, bound

READY_SECONDS = 60.0  # for Prometheus to read its old data
GOODBYE_SECONDS = 20.0
POLL_SECONDS = 0.1
RETENTION = "30d"
TARGETS = '["127.0.0.1:9464"]'  # as prometheus.yml has them
INSTALL = (
    "there is no program `prometheus` on this machine. Debian and Ubuntu: apt-get install --no-install-recommends "
    "prometheus. Elsewhere: https://prometheus.io/download, unpacked somewhere on the PATH"
)


def run_observe(config: ObserveConfig, files: Path) -> None:
    """Start Prometheus and wait until it ends."""
    observer = Observer(config, files)
    observer.start()
    print(f"watching {', '.join(observer.targets)}: {observer.url}", flush=True)
    observer.wait()


class Observer:
    """A Prometheus process. Owned by the main thread."""

    def __init__(self, config: ObserveConfig, files: Path) -> None:
        self.targets = targets_of(config.metrics)
        self._listen = config.listen
        self._host, self._port = address_of(config.listen, "listen")
        self._files = files
        self._directory = Path(config.data).absolute() if config.data else default_directory()
        self._log = self._directory / "prometheus.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._signalled = False

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self._host in ("0.0.0.0", "::") else self._host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}/consoles/seedrl.html"

    def start(self) -> None:
        """Start Prometheus and return when it answers; raise with its last error if it does not."""
        program = shutil.which("prometheus")
        if program is None:
            raise ConfigError(INSTALL)
        self._refuse_a_port_in_use()
        self._write_configuration()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._forward)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [program, *self._arguments()],
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self._wait_until_ready()

    def wait(self) -> None:
        """Wait until Prometheus ends; raise unless that follows a signal."""
        assert self._process is not None
        code = self._process.wait()
        if not self._signalled:
            raise SeedrlError(f"Prometheus ended with code {code}: {self._last_words()}")

    def _arguments(self) -> list[str]:
        return [
            f"--config.file={self._directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._directory / 'data'}",
            f"--storage.tsdb.retention.time={RETENTION}",
            f"--web.listen-address={self._listen}",
            f"--web.cors.origin=http://{self._listen}",  # by default any page in the browser may read along
            f"--web.console.templates={self._files / 'consoles'}",
            f"--web.console.libraries={self._files / 'consoles'}",  # there are none: the console is self-contained
        ]

    def _write_configuration(self) -> None:
        """Write the committed configuration with the given targets, and its rules."""
        text = (self._files / "prometheus.yml").read_text()
        assert TARGETS in text
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / "prometheus.yml").write_text(text.replace(TARGETS, json.dumps(self.targets)))
            shutil.copyfile(self._files / "rules.yml", self._directory / "rules.yml")
        except OSError as error:
            raise ConfigError(f"data={self._directory} cannot be written to: {error}") from error

    def _refuse_a_port_in_use(self) -> None:
        """Raise ConfigError early: Prometheus would fail only after reading all of its data."""
        try:
            bound(self._host, self._port).close()
        except OSError as error:
            raise ConfigError(
                f"listen={self._listen} cannot be used: {error.strerror}. Another Prometheus may run already and "
                "could watch this learner as well; else choose another port, e.g. listen=127.0.0.1:9091"
            ) from error

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + READY_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None:
                raise SeedrlError(f"Prometheus ended with code {self._process.returncode}: {self._last_words()}")
            if time.monotonic() > deadline:
                self._end()
                raise SeedrlError(f"Prometheus is not ready after {READY_SECONDS:.0f} s: {self._last_words()}")
            time.sleep(POLL_SECONDS)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(self._host or "127.0.0.1", self._port, timeout=2.0)
        try:
            connection.request("GET", "/-/ready")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()

    def _forward(self, number: int, _: object) -> None:
        self._signalled = True
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def _end(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(GOODBYE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _last_words(self) -> str:
        """Return the last error that Prometheus has logged, or its last line."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        complaints = [line for line in lines if "level=error" in line] or lines
        return f"{complaints[-1] if complaints else 'its log is empty'} (the whole log: {self._log})"


def targets_of(metrics: object) -> list[str]:
    """Return the addresses in `metrics=`: one, several separated by commas, or a list."""
    addresses = metrics.split(",") if isinstance(metrics, str) else metrics
    if not isinstance(addresses, list) or not addresses:
        raise ConfigError(f"metrics={metrics!r} must be HOST:PORT, or several: [HOST:PORT,HOST:PORT]")
    targets = [str(address).strip() for address in addresses]
    for target in targets:
        address_of(target, "metrics")
    return targets


def default_directory() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "seedrl/prometheus"
