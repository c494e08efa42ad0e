"""The learner process: builds its parts, names its threads, shuts them down in order.

server      reads streams, runs batches, answers  serving/server.py, batch_loop.py, inference.py
learner     trains, publishes, checkpoints        training.py, learning/loop.py, learner.py
dump        records finished unrolls              recordings/recorder.py; only with store.dump
metrics     serves pages over HTTP                monitoring/endpoint.py
callbacks   calls code of the user's own          run/callbacks.py; only if the settings name some
main        shows progress, handles signals       here
"""

import contextlib
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from seedrl import plugins
from seedrl.config import Display, LearnerConfig
from seedrl.device import choose_device, learning_stream
from seedrl.errors import ConfigError, RankLost, RunDirectoryError, ThreadDied
from seedrl.learning.loop import POLL_SECONDS
from seedrl.metrics import LearningMetrics, ServingMetrics
from seedrl.monitoring.life import Running, Watched
from seedrl.monitoring.monitor import Monitor
from seedrl.recordings.files import Recording
from seedrl.recordings.places import place_of
from seedrl.recordings.source import check_recording
from seedrl.roles.peers import Alone, Peers
from seedrl.roles.training import Training
from seedrl.run.budget import check_store
from seedrl.run.callbacks import Callbacks
from seedrl.run.closing import closing_words, failed_words
from seedrl.run.context import ContextFile, State
from seedrl.run.events import Events
from seedrl.run.finding import remember
from seedrl.run.identity import ALONE, Identity
from seedrl.run.membership import Membership
from seedrl.run.progress import ProgressDisplay, console
from seedrl.run.saving import Saver
from seedrl.run.snapshot import spec_of
from seedrl.run.stopping import Stop, stop_on_signals
from seedrl.run.summary import summarize
from seedrl.run.totals import Counts, RunClock, counts_of, restore_counters
from seedrl.serving.seats import planned_seats
from seedrl.serving.service import InferenceService
from seedrl.serving.sessions import session_seed
from seedrl.specs import EnvSpec
from seedrl.tracebacks import failed, report
from seedrl.validation import check
from seedrl.wire.messages import Command

LOOK_SECONDS = 0.5
_FINAL_STATES = {"done": State.DONE, "interrupted": State.INTERRUPTED, "failed": State.FAILED}
CALLBACK_SECONDS = 3.0  # for callbacks to finish the events that wait when the run ends
STOP_SECONDS = 8.0  # for the threads to end: less than a supervisor waits


class LearnerProcess:
    """One learner process. Everything here runs in the main thread unless it says otherwise."""

    def __init__(self, config: LearnerConfig, identity: Identity = ALONE) -> None:
        check(config)
        _import_own_code(config)
        place_of("store.dump", config.store.dump)  # what cannot be opened is refused before any actor has to join
        self.recording = _recording(config)
        self.device = choose_device(config.device, identity.local_rank)
        self.stop = Stop(on_stop=self._turn_away)
        self.peers = _peers(config, identity, self.device)
        self.run_directory, config = self.peers.open_run(config)
        self.config = config
        self.serving = ServingMetrics()
        self.learning = LearningMetrics()
        self.display = ProgressDisplay(config, console(self._log()), identity)
        self.saver = Saver(config.checkpoint, self.run_directory.checkpoints, self.learning, say=self.display.say)
        self.checkpoint = self.peers.share_checkpoint(self.saver.load() if identity.is_first else None)
        callbacks = Callbacks(config, self.run_directory.path, self.learning, say=self.display.say)
        self.events = Events(callbacks, self.serving, self.learning)
        self.inference = InferenceService(
            config,
            self.serving,
            plan=planned_seats(config),
            job_seed=partial(session_seed, config.seed, self.run_directory.earlier_processes, rank=identity.rank),
            on_failure=self.thread_died,
            say=self.display.say,
            describe=lambda: self.monitor.status(),
            check_spec=partial(check_store, config, self.device),
            on_member=self.events.member,
        )
        if self.checkpoint is not None:
            restore_counters(self.checkpoint.state, self.serving, self.learning, identity.rank)
            self.inference.sessions.agree(spec_of(self.checkpoint))
        elif self.recording is not None:
            self.inference.sessions.agree(self.recording.spec)
        self.inference.sessions.is_open = self.recording is None
        self.rounds = self.peers.rounds(self.stop, self.inference, self.serving, self.saver)
        context_file = ContextFile(self.run_directory.path)
        watched = Watched(
            config,
            str(self.device),
            self.run_directory,
            self.serving,
            self.learning,
            self.inference.sessions,
            self.inference.batcher,
            identity,
        )
        self.monitor = Monitor(
            watched,
            say=self.display.say,
            desired_before=context_file.read_or_new().desired_actors,
            progress=self.peers.shown_progress,
        )
        self.membership = Membership(
            context_file,
            self.inference.sessions,
            self.serving,
            self.learning,
            newest_checkpoint=lambda: self.saver.newest,
            desired_actors=lambda: self.monitor.desired_actors,
            progress=self.peers.shown_progress,
            incarnation=self.run_directory.earlier_processes + 1,
        )
        self.training: Training | None = None  # built as soon as the spaces are known
        self.clock = RunClock()

    def run(self) -> dict[str, Any]:
        """Serve and train until the run is done or asked to stop; return the summary."""
        try:
            if (
                known := self._known_spaces()
            ) is not None:  # first, so that actors that find the port are served at once
                self._build(known)
            address = self._open()
            if known is None and (spec := self._wait_for_spaces(address)) is not None:
                self._build(spec)
            has_spaces = self.training is not None  # else the ranks have agreed to stop
            if has_spaces and self.rounds.agree() and not self.rounds.stop_if_done():  # a resumed run may be done
                self._start_threads()
                self._watch()
        except BaseException as error:
            self.stop.fail(error)
        summary = self._shut_down()
        self.peers.leave()
        if self.stop.failure is not None:
            self._log_failure(self.stop.failure)
            if not self.run_directory.has_job:  # else `seedrl run` may start it again
                self._explain(self.stop.failure)
            raise self.stop.failure
        if self.learning.updates or not self.run_directory.has_job:  # else `seedrl run` says why nothing was trained
            self.display.say(closing_words(self.run_directory, self.config, summary))
        return summary

    def _explain(self, failure: BaseException) -> None:
        """Add what a user can do about a failure; if the settings were refused, the run was never one."""
        is_refused = isinstance(failure, ConfigError)
        if not (is_refused and self.run_directory.discard_if_unused()):
            failure.add_note(failed_words(self.run_directory, self.config))

    def _log(self) -> Path | None:
        """Return where a rank writes that is not the first, which has the terminal."""
        return None if self.peers.identity.is_first else self.run_directory.logs / "learner.log"

    def _log_failure(self, failure: BaseException) -> None:
        """Append the failure to the log of the role; whatever started this process prints it as well."""
        with contextlib.suppress(OSError):
            self.run_directory.logs.mkdir(exist_ok=True)
            with (self.run_directory.logs / "learner.log").open("a") as log:
                print(f"seedrl {self.peers.identity}: {report(failure)}", file=log)

    def _turn_away(self) -> None:
        """Stop being ready; runs in the thread that asks to stop."""
        self.monitor.set_draining()
        self.inference.server.set_ready(False)

    def _open(self) -> str:
        """Let actors and people find the learner from now on; return where."""
        self.events.start()
        address = self.inference.server.start()
        self.monitor.start(address)
        near = self.config.socket or address  # what people on this machine can reach without TLS
        self.membership.begin(near, self.monitor.address)
        where = f"run directory {self.run_directory.path}"
        self.display.say(f"learner: serving {self.config.env.id} at {address}; {where}")
        if self.config.display is Display.none:
            self.display.say(f"learner: {where}", is_essential=True)
        if self.monitor.address:
            self.display.say(f"learner: live page at http://{self.monitor.address}/, metrics at /metrics")
        self.peers.announce(self.inference.balance.address)
        return address

    def _known_spaces(self) -> EnvSpec | None:
        """Return the spaces that need no actor to announce them."""
        if self.checkpoint is not None:
            return spec_of(self.checkpoint)
        return self.recording.spec if self.recording is not None else None

    def _wait_for_spaces(self, address: str) -> EnvSpec | None:
        """Wait for the first actor, which announces the spaces; return None if asked to stop before."""
        waiting_since = time.monotonic()
        has_hinted = False
        while self.rounds.agree():
            if (spec := self.peers.agreed_spec(self.inference)) is not None:
                return spec
            self.stop.wait(POLL_SECONDS)
            self.membership.tick()
            if not has_hinted and time.monotonic() - waiting_since > 5:
                self.display.say(f"learner: waiting for actors; start one with: seedrl actor learner={address}")
                has_hinted = True
        return None

    def _build(self, spec: EnvSpec) -> None:
        with learning_stream(self.device):
            self.training = Training(self, spec)
            self.training.begin(self.checkpoint)

    def _start_threads(self) -> None:
        assert self.training is not None
        self.clock.start()
        training, store = self.training, self.training.store
        running = Running(
            store,
            store.columns.nbytes,
            training.policy,
            self.inference.batches,
            training.algorithm,
            training.is_on_policy,
            training.signs,
        )
        self.monitor.begin(running, self.clock.seconds_before)
        training.start()
        self.inference.begin(on_ready=self._become_ready)

    def _watch(self) -> None:
        first_version = self.learning.updates
        while not self.stop.wait(LOOK_SECONDS):
            self.display.show(self.monitor.sample())
            self.inference.server.set_live(self.monitor.is_alive)
            self.inference.server.rebalance()
            if self.monitor.is_ready:
                self.membership.serve(is_training=self.learning.updates > first_version)
            self.membership.tick()

    def _shut_down(self) -> dict[str, Any]:
        """End the threads first, so that nothing moves any more; then save; then dismiss the actors."""
        failed = self.stop.failure is not None
        self.membership.enter(State.FAILED if failed else State.DRAINING, self.stop.reason)
        was_running = self.inference.has_begun
        if was_running:
            self._join_threads()
        counts = self._save_last() if was_running and self.stop.failure is None else None
        over = self.stop.status == "done"
        command = Command.END if over else Command.DRAIN
        self.inference.server.stop(command, self.stop.reason)
        self.events.close(CALLBACK_SECONDS)
        self.display.close()
        counts = counts or counts_of(self.serving, self.learning)
        summary = summarize(self.config, self.stop, counts, self.clock.seconds, self.monitor.finish())
        if was_running or self.checkpoint is None:  # else nothing happened since the summary that is there
            self._write_summary(summary)
        self.membership.enter(_FINAL_STATES[self.stop.status], self.stop.reason)
        try:
            self.monitor.close(summary, is_coming_back=isinstance(self.stop.failure, RankLost))
        except Exception as error:  # the run is over and saved: no reason for it to fail
            self.display.say(f"learner: its measurements could not be finished ({error!r})")
        self.run_directory.release()
        return summary

    def _write_summary(self, summary: dict[str, Any]) -> None:
        try:
            self.run_directory.write_summary(summary)
        except OSError as error:  # the disk is full, and so is what was reserved of it
            self.display.say(f"learner: summary.json could not be written ({error}); it is missing or out of date")

    def _save_last(self) -> Counts | None:
        """Save after the threads have ended; return what all ranks have counted, if this is the first of them."""
        assert self.training is not None
        try:
            with learning_stream(self.device):
                counts = self.training.save()
        except RankLost as error:  # the run resumes from the checkpoint before
            self.stop.fail(error)
            return None
        if self.saver.failure:
            saved = f"the newest is {self.saver.newest}" if self.saver.newest else "there is none"
            words = f"{self.stop.reason}, but the last checkpoint could not be written ({self.saver.failure}); {saved}"
            self.stop.fail(RunDirectoryError(f"{words}. Make room before resuming the run"))
        return counts if self.peers.identity.is_first else None

    def _join_threads(self) -> None:
        """Wait until serving has paused and the learner has ended, each in time."""
        assert self.training is not None
        self.inference.pause()
        deadline = time.monotonic() + STOP_SECONDS
        self.training.thread.join(STOP_SECONDS)
        if self.training.thread.is_alive():
            self.stop.fail(ThreadDied(f"thread learner did not stop within {STOP_SECONDS:.0f} s"))
        if not self.inference.wait(max(0.0, deadline - time.monotonic())):
            self.stop.fail(ThreadDied(f"thread server did not stop within {STOP_SECONDS:.0f} s"))
        if self.training.recorder is not None and not self.training.recorder.close(STOP_SECONDS):
            self.display.say(f"learner: the last unrolls could not be recorded within {STOP_SECONDS:.0f} s")

    # In other threads.

    def thread_died(self, error: BaseException) -> None:
        name = threading.current_thread().name
        self.stop.fail(failed(ThreadDied, f"thread {name} died", error))

    def _become_ready(self) -> None:
        """Runs in the server thread."""
        if not self.stop.is_set():
            self.monitor.set_ready()
            self.inference.server.set_ready(True)


def _import_own_code(config: LearnerConfig) -> None:
    """Raise ConfigError for code of the user's own that cannot be imported, before any actor has to join."""
    own = {
        "model.name": config.model.name,
        "algorithm.name": config.algorithm.name,
        "store.select": config.store.select,
    }
    for setting, path in own.items():
        if plugins.is_import_path(path):
            plugins.load(setting, path)


def _recording(config: LearnerConfig) -> Recording | None:
    """Return the recorded unrolls to train on, checked; None if actors are the source."""
    if not config.source:
        return None
    recording = Recording.open(place_of("source", config.source))
    check_recording(recording, config.env.id, config.algorithm.unroll_length, config.env.frame_stack)
    return recording


def _peers(config: LearnerConfig, identity: Identity, device: torch.device) -> Peers:
    if identity.world_size == 1:
        return Alone(identity)
    from seedrl.ranks.group import Ranks
    from seedrl.ranks.peers import RankPeers

    return RankPeers(config, Ranks.join(identity, device, config.ranks.timeout))


def run_learner(config: LearnerConfig, identity: Identity) -> None:
    """Run `seedrl learner` until it is done; SIGINT and SIGTERM end it cleanly, a second one at once."""
    if config.ranks.separate and identity.rank > 0:
        from seedrl.roles.trainer import TrainerProcess

        TrainerProcess(config, identity).run()
        return
    process = LearnerProcess(config, identity)
    stop_on_signals(process.stop, process.display.say)
    if identity.is_first:
        remember(process.run_directory.path)
    process.run()
