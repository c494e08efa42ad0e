"""The actor process: signals and exit codes around an Actor."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

from envs_server.actor import Actor
from seedrl.config import ActorConfig
from seedrl.metrics import ActorMetrics
from seedrl.monitoring.endpoint import Endpoint, Page
from seedrl.monitoring.exposition import CONTENT_TYPE, Exposition
from seedrl.run.stopping import handle_signals


def run_actor(config: ActorConfig) -> None:
    """Run `seedrl actor` until training is over, or until SIGINT or SIGTERM."""
    actor = Actor(**vars(config))

    def handle(number: int, _: Any) -> None:
        # In a thread: the one interrupted may hold the very locks that this takes.
        threading.Thread(target=actor.stop, name="stop").start()

    handle_signals(handle)
    with contextlib.ExitStack() as until_the_end:
        if config.metrics:
            endpoint = Endpoint(config.metrics, _pages(actor.metrics))
            print(f"actor: metrics at http://{endpoint.start()}/metrics")
            until_the_end.callback(endpoint.stop)
        actor.run()


def _pages(metrics: ActorMetrics) -> dict[str, Callable[[], Page]]:
    exposition = Exposition(metrics)
    return {
        "/metrics": lambda: Page(exposition.text(), CONTENT_TYPE),
        "/healthz": lambda: Page(b"alive\n"),
        "/readyz": lambda: Page(b"in a session\n") if metrics.actor_connected else Page(b"no learner\n", status=503),
    }
