"""The pages of a learner: for browsers, for Prometheus, for programs and for probes. Knows nothing of HTTP."""

import json
from collections.abc import Callable
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from seedrl.monitoring.endpoint import Page
from seedrl.monitoring.exposition import CONTENT_TYPE, Exposition
from seedrl.monitoring.history import History
from seedrl.monitoring.life import Life
from seedrl.monitoring.reporting import Reporter

HEALTH, READY = "/healthz", "/readyz"


def learner_pages(
    reporter: Reporter, exposition: Exposition, history: History, life: Life
) -> dict[str, Callable[[], Page]]:
    """Return the pages by path. They are made by the thread of the endpoint."""
    return {
        "/": live_page,
        "/metrics": lambda: Page(exposition.text(), CONTENT_TYPE),
        "/status.json": lambda: _json(asdict(reporter.status())),
        "/history.json": lambda: _json({"rows": history.rows()}),
        HEALTH: lambda: _health(life),
        READY: lambda: Page(f"{life.state}\n".encode(), status=200 if life.state == "running" else 503),
    }


def live_page() -> Page:
    """Return the page that shows a run in a browser. It polls `status.json` and `history.json` beside it."""
    content = files("seedrl.monitoring").joinpath("page.html").read_bytes()
    return Page(content, "text/html; charset=utf-8")


def _health(life: Life) -> Page:
    if life.is_alive:
        return Page(b"alive\n")
    return Page(f"rows wait and no batch has run for {life.silent_seconds:.0f} s\n".encode(), status=503)


def _json(content: dict[str, Any]) -> Page:
    return Page(json.dumps(content).encode(), "application/json")
