"""Everything that shows a running learner, built and ended together: rows, status and pages.

    recorder.py    samples the learner and writes rows down       main thread
    reporting.py   status and gauges, whenever they are asked for  any thread
    pages.py       the pages, served by endpoint.py                thread `metrics`

Knows nothing of how a learner works inside.
"""

import contextlib
from collections.abc import Callable

from seedrl.monitoring.endpoint import Endpoint
from seedrl.monitoring.exposition import Exposition
from seedrl.monitoring.life import Life, Running, Watched
from seedrl.monitoring.pages import learner_pages
from seedrl.monitoring.plots import draw_curve
from seedrl.monitoring.recorder import Recorder
from seedrl.monitoring.reporting import Reporter
from seedrl.monitoring.sampler import Row
from seedrl.run.stopping import Progress
from seedrl.status import Learning, Status
from seedrl.trained.card import write_card


class Monitor:
    """`start`, `begin`, `sample`, `finish` and `close` belong to the main thread; the rest is for any thread."""

    def __init__(
        self,
        watched: Watched,
        say: Callable[[str], None],
        desired_before: int = 0,
        progress: Callable[[], Progress | None] = lambda: None,
    ) -> None:
        """`progress` is that of all ranks, if this process shows it."""
        self._run_dir = watched.run_directory.path
        self._life = life = Life()
        self._recorder = Recorder(watched, life, say, desired_before, progress)
        self._reporter = reporter = Reporter(watched, life, self._recorder)
        exposition = Exposition(watched.serving, watched.learning, reporter.state, refresh=reporter.refresh)
        pages = learner_pages(reporter, exposition, self._recorder.history, life)
        listen = watched.config.metrics
        self._endpoint = Endpoint(listen, pages, on_error=say) if listen else None

    def start(self, listen: str) -> None:
        """Serve the pages from now on; `listen` is where actors find the learner. Raise ConfigError if that fails."""
        self._life.listen = listen
        if self._endpoint is not None:
            self._life.pages = self._endpoint.start()

    def begin(self, running: Running, seconds_before: float) -> None:
        """Sample from now on: the parts are built, and serving and training begin."""
        self._recorder.begin(seconds_before)
        self._life.running = running

    def sample(self) -> Row:
        """Return what has happened over the last few samples; write it down now and then."""
        return self._recorder.sample()

    def finish(self) -> Learning:
        """Take the last sample, if the learner ran; return the verdict on the whole run."""
        with contextlib.suppress(Exception):  # whatever fails here, the run has to be saved and summarized
            return self._recorder.finish()
        return Learning()

    def close(self, summary: Row, is_coming_back: bool = False) -> None:
        """End the pages and what is written; draw what takes seconds, unless the run is started again at once."""
        if self._endpoint is not None:
            self._endpoint.stop()
        self._recorder.close(summary)
        if not is_coming_back:
            draw_curve(self._run_dir)
            with contextlib.suppress(Exception):  # the card is a page for people; whatever fails there, the run is fine
                write_card(self._run_dir)

    # For any thread.

    def set_ready(self) -> None:
        """Note that actors are served."""
        self._life.is_ready = True

    def set_draining(self) -> None:
        """Note that the learner was asked to stop."""
        self._life.is_draining = True

    def status(self) -> Status:
        return self._reporter.status()

    @property
    def is_ready(self) -> bool:
        return self._life.is_ready

    @property
    def is_alive(self) -> bool:
        """Return whether batches run as long as rows wait for them."""
        return self._life.is_alive

    @property
    def address(self) -> str:
        """Return where the pages are; empty if there are none."""
        return self._life.pages

    @property
    def desired_actors(self) -> int:
        """Return how many actors the learner could use."""
        return self._recorder.autoscaler.desired
