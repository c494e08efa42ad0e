"""The page that people watch a run on, for those without Prometheus. Knows only where it is; it asks for the rest."""

from importlib.resources import files

from seedrl.monitoring.endpoint import Page


def live_page() -> Page:
    """Polls `status.json` and `history.json` beside it, and needs nothing else."""
    content = files("seedrl.monitoring").joinpath("page.html").read_bytes()
    return Page(content, "text/html; charset=utf-8")
