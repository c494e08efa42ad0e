"""`seedrl serve` answers any client of the protocol with the policy of a run. Knows nothing of its clients."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path

from seedrl.config import LearnerConfig, ServeConfig
from seedrl.errors import SeedrlError
from seedrl.monitoring.endpoint import Endpoint, Page
from seedrl.monitoring.exposition import CONTENT_TYPE, Exposition
from seedrl.roles.policy_server import PolicyServer, settings_of
from seedrl.run import checkpoint as files
from seedrl.run.snapshot import chosen_checkpoint
from seedrl.run.stopping import stop_on_signals
from seedrl.validation import check_serve
from seedrl.wire.address import refuse_if_taken
from seedrl.wire.messages import Command

LOOK_SECONDS = 0.5
BIND_SECONDS = 10.0


class Serving:
    """One process. Everything here runs in the main thread."""

    def __init__(self, config: ServeConfig, say: Callable[[str], None]) -> None:
        check_serve(config)
        self._config = config
        self._say = say
        self._checkpoints = Path(config.run) / "checkpoints"
        self._asked = threading.Event()  # set when the newest weights are asked for
        self._newest = self._newest_name()
        checkpoint = chosen_checkpoint(Path(config.run), config.checkpoint, warn=say)
        self.deployment = PolicyServer(
            serve_settings(config), checkpoint, greedy=config.greedy, seed=config.seed, say=say
        )
        self._endpoint = Endpoint(config.metrics, self._pages(), on_error=say) if config.metrics else None

    def run(self) -> None:
        """Serve until a stop is asked for."""
        deployment = self.deployment
        try:
            if self._endpoint is not None:
                self._say(f"serve: metrics at http://{self._endpoint.start()}/metrics")
            address = deployment.start() + self._open_websocket()
            manner = "greedily" if self._config.greedy else "sampling"
            self._say(f"serve: {self._config.run} at {address}, acting {manner}; policy {deployment.policy.version:,}")
            while not deployment.stop.wait(LOOK_SECONDS):
                self._look()
        finally:
            deployment.close(Command.DRAIN, deployment.stop.reason or "The policy is served no longer")
            if self._endpoint is not None:
                self._endpoint.stop()

    def _open_websocket(self) -> str:
        """Listen for WebSocket clients if that is set; return the address in words."""
        config, inference = self._config, self.deployment.inference
        if not config.websocket:
            return ""
        from seedrl.serving.websocket import WebSocketServer

        refuse_if_taken(config.websocket, "websocket")
        door = WebSocketServer(config.websocket, config.security, inference.protocol, self._say)
        inference.server.run(door.run())
        return f" and {door.bound.result(timeout=BIND_SECONDS)}"

    def reload(self) -> None:
        """Load the newest weights soon. For any thread or signal handler."""
        self._asked.set()

    def _look(self) -> None:
        newest = self._newest_name()
        is_new = self._config.watch and newest != self._newest
        if self._asked.is_set() or is_new:
            self._asked.clear()
            self._newest = newest
            self._reload()

    def _reload(self) -> None:
        """Load the newest checkpoint; one that cannot be loaded is logged, and the one before stays in use."""
        try:
            checkpoint = chosen_checkpoint(Path(self._config.run), self._config.checkpoint, warn=self._say)
            self.deployment.reload(checkpoint)
        except (SeedrlError, OSError) as error:
            self._say(f"serve: the weights could not be replaced ({error}); the previous ones stay in use")
            return
        self._say(f"serve: policy {self.deployment.policy.version:,} from now on")

    def _newest_name(self) -> str:
        paths = files.found(self._checkpoints)
        return paths[-1].name if paths else ""

    def _pages(self) -> dict[str, Callable[[], Page]]:
        exposition = Exposition(self.deployment.metrics)
        return {
            "/metrics": lambda: Page(exposition.text(), CONTENT_TYPE),
            "/healthz": lambda: Page(b"alive\n"),
            "/readyz": lambda: Page(b"serving\n") if self.deployment.is_ready else Page(b"not ready\n", status=503),
        }


def serve_settings(config: ServeConfig) -> LearnerConfig:
    settings = settings_of(config.run, config.envs)
    settings.listen, settings.metrics, settings.security = config.listen, config.metrics, config.security
    settings.serving.max_slots = max(config.max_slots, settings.actors.envs)
    settings.serving.max_silence = config.max_silence
    settings.device, settings.threads = config.device, config.threads
    return settings


def run_serve(config: ServeConfig) -> None:
    """Handle signals: SIGINT and SIGTERM end it cleanly, a second one at once; SIGHUP loads the newest weights."""
    service = Serving(config, say=_say)
    stop_on_signals(service.deployment.stop, _say)
    signal.signal(signal.SIGHUP, lambda *_: service.reload())
    service.run()


def _say(words: str) -> None:
    print(words, flush=True)
