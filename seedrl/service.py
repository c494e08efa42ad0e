"""The learner process: builds its parts, names its threads, shuts them down in order.

server      reads streams, runs batches, answers  serving/server.py, batches.py, inference.py
learner     trains, publishes, checkpoints        learning/learner.py
main        shows progress, handles signals       here
"""

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from seedrl.config import LearnerConfig, check, store_sizes
from seedrl.device import after_serving, choose_device, free_bytes, own_stream
from seedrl.errors import Mismatch, SeedrlError, ThreadDied
from seedrl.learning import checkpoint as checkpoints
from seedrl.learning.learner import Learner
from seedrl.metrics import LearningMetrics, ServingMetrics, Stopwatch
from seedrl.models.base import core_size_of
from seedrl.models.build import build_model
from seedrl.monitoring.monitor import Monitor, trouble
from seedrl.policy import Policy
from seedrl.progress import ProgressDisplay, closing_words, console
from seedrl.rundir import RunDirectory
from seedrl.serving.batcher import Batcher
from seedrl.serving.batches import Batches
from seedrl.serving.inference import Inference
from seedrl.serving.server import Server
from seedrl.serving.sessions import Request, SessionTable, session_seed
from seedrl.serving.slots import Slots
from seedrl.snapshot import Resumable, initial_weights, load_weights, spec_of
from seedrl.specs import EnvSpec
from seedrl.store import Store
from seedrl.v1 import inference_pb2 as pb

POLL_SECONDS = 0.1  # how long a thread waits before it looks whether to stop
LOOK_SECONDS = 0.5
STOP_SECONDS = 8.0  # for the threads to end: less than a supervisor waits


class Stop:
    """Whether, how and why the process ends. Thread-safe; the first word counts."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self.status = ""
        self.reason = ""
        self.failure: BaseException | None = None

    def ask(self, status: str, reason: str, failure: BaseException | None = None) -> None:
        with self._lock:
            if not self._event.is_set():
                self.status, self.reason, self.failure = status, reason, failure
                self._event.set()

    def fail(self, failure: BaseException) -> None:
        """Ends as a failure, whatever was asked before."""
        with self._lock:
            self.status, self.reason, self.failure = "failed", str(failure), failure
            self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)


class LearnerService:
    """One learner process. Everything here runs in the main thread unless it says otherwise."""

    def __init__(self, config: LearnerConfig) -> None:
        check(config)
        self.config = config
        self.device = choose_device(config.device)
        self.stop = Stop()
        self.run_directory = RunDirectory.prepare(config)
        self.run_directory.claim(config)
        self.serving = ServingMetrics()
        self.learning = LearningMetrics()
        self.batcher: Batcher[Request] = Batcher(
            config.serving.max_rows, config.serving.min_rows, config.serving.max_wait
        )
        self.display = ProgressDisplay(config, console())
        self.checkpoint = checkpoints.load_newest(self.run_directory.checkpoints, warn=self.display.say)
        resumed_at = self.checkpoint.state["learning"]["updates"] if self.checkpoint is not None else 0
        seeds = partial(session_seed, config.seed, resumed_at)
        self.sessions = SessionTable(config, job_seed=seeds, check_spec=self._check_memory)
        if self.checkpoint is not None:
            self.sessions.agree(spec_of(self.checkpoint))
        self.monitor = Monitor(
            config, self.run_directory, self.serving, self.learning, self.sessions, self.batcher, say=self.display.say
        )
        self.monitor.device = str(self.device)
        self.server = Server(
            config,
            self.sessions,
            self.batcher,
            self.serving,
            on_failure=self._thread_died,
            say=self.display.say,
            describe=self.monitor.status,
        )
        self.learner_thread = threading.Thread(target=self._run_learner, name="learner", daemon=True)
        self.batches_done: Future[None] | None = None
        self.seconds_before = 0.0  # of this run, in earlier processes
        self.began = time.monotonic()
        self.saved = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Serves and trains until it is done or asked to stop; returns the summary."""
        try:
            address = self.server.start()
            self.monitor.start()
            self.run_directory.write_context({"pid": os.getpid(), "address": address, "metrics": self.monitor.address})
            self._introduce(address)
            if self._wait_for_spaces(address):
                self._build(self.sessions.spec.result())
                self._check_whether_done()  # before a resumed run goes on
                if not self.stop.is_set():
                    self._start_threads()
                    self._watch()
        except BaseException as error:
            self.stop.ask("failed", str(error), error)
        summary = self._shut_down()
        if self.stop.failure is not None:
            raise self.stop.failure
        if self.learning.updates:
            self.display.say(closing_words(summary, str(self.run_directory.path)))
        return summary

    def _introduce(self, address: str) -> None:
        self.display.say(f"learner: serving {self.config.env.id} at {address}; run directory {self.run_directory.path}")
        if self.monitor.address:
            self.display.say(f"learner: live page at http://{self.monitor.address}/, metrics at /metrics")

    def _wait_for_spaces(self, address: str) -> bool:
        """Waits for the first actor, which tells the spaces; false if asked to stop before."""
        waiting_since = time.monotonic()
        told = False
        while not self.sessions.spec.done():
            if self.stop.wait(POLL_SECONDS):
                return False
            if not told and time.monotonic() - waiting_since > 5:
                self.display.say(f"learner: waiting for actors; start one with: seedrl actor learner={address}")
                told = True
        return True

    def _build(self, spec: EnvSpec) -> None:
        config = self.config
        device = self.device
        torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // 2))
        stacked = EnvSpec(spec.observation.stacked(config.env.frame_stack), spec.num_actions)
        model = build_model(config.model, stacked, config.seed).to(device)
        core_size = core_size_of(model)
        self.store = Store(spec, **store_sizes(config, core_size), device=device)
        generator = torch.Generator(device).manual_seed(config.seed)
        policy = Policy(model, version=0)
        self.policy = policy
        self.learner = Learner(
            config, model, self.store, policy, self.learning, env_steps=lambda: self.serving.env_steps
        )
        self.resumable = Resumable(self.learner, generator, self.serving, self.learning, spec)
        inference = Inference(
            policy,
            Slots(config.serving.max_slots, config.env.frame_stack, core_size, device),
            self.store,
            self.serving,
            generator=generator,
            device=device,
            answer=self.server.answer,
        )
        self.batches = Batches(
            self.batcher, inference, self.serving, may_go_on=self._is_in_step if config.lockstep else lambda: True
        )
        self.store.on_free = self.batches.wake
        self.sessions.on_leave = inference.release
        self._restore()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self.display.say(
            f"learner: {spec}; {parameters:,} parameters on {device}; store of "
            f"{self.store.nbytes / 2**20:,.0f} MiB for "
            f"{config.serving.max_slots} slots and {self.store.capacity} finished unrolls"
        )

    def _restore(self) -> None:
        """Takes up the newest checkpoint of the run directory, or the weights of `init_from`."""
        if self.checkpoint is not None:
            self.seconds_before = self.resumable.restore(self.checkpoint)
            self.display.say(f"learner: resumed at {self.serving.env_steps:,} steps, {self.learning.updates:,} updates")
        elif self.config.init_from:
            load_weights(self.learner.model, initial_weights(self.config.init_from, warn=self.display.say))
            self.display.say(f"learner: initial weights from {self.config.init_from}")
        self.first_version = self.learning.updates
        self.learner.publish()

    def _start_threads(self) -> None:
        self.began = self.saved = time.monotonic()
        self.monitor.begin(self.store, self.policy, self.batches, self.seconds_before)
        self.learner_thread.start()
        self.batches_done = self.server.run(self._serve_batches())
        self.server.set_ready(True)

    def _watch(self) -> None:
        while not self.stop.wait(LOOK_SECONDS):
            self.display.show(self.monitor.look())

    def _shut_down(self) -> dict[str, Any]:
        """Threads first, so that nothing moves any more; then the checkpoint; then the actors."""
        self.server.set_ready(False)
        self.monitor.is_draining = True
        was_running = self.batches_done is not None
        if was_running:
            self._join_threads()
            self.monitor.look(is_last=True)
        if was_running and self.stop.failure is None:
            self._save()
        over = self.stop.status == "done"
        command = pb.Control.COMMAND_END if over else pb.Control.COMMAND_DRAIN
        self.server.stop(command, self.stop.reason)
        self.display.close()
        summary = self._summary()
        if was_running or self.checkpoint is None:  # else nothing happened since the summary that is there
            with contextlib.suppress(OSError):  # a full disk; the words at the end say the same
                self.run_directory.write_summary(summary)
        self.monitor.close(summary)
        self.run_directory.release()
        return summary

    def _join_threads(self) -> None:
        """Serving pauses and the learner ends, each in time."""
        self.batches.stop()
        deadline = time.monotonic() + STOP_SECONDS
        self.learner_thread.join(STOP_SECONDS)
        if self.learner_thread.is_alive():
            self.stop.fail(ThreadDied(f"thread learner did not stop within {STOP_SECONDS:.0f} s"))
        try:
            assert self.batches_done is not None
            self.batches_done.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            self.stop.fail(ThreadDied(f"thread server did not stop within {STOP_SECONDS:.0f} s"))

    def _summary(self) -> dict[str, Any]:
        serving, learning = self.serving, self.learning
        seconds = self.seconds_before + time.monotonic() - self.began
        return {
            "status": self.stop.status,
            "reason": self.stop.reason,
            "env": self.config.env.id,
            "env_steps": serving.env_steps,
            "frames": serving.env_steps * self.config.env.frame_skip,
            "updates": learning.updates,
            "episodes": serving.episodes,
            "seconds": round(seconds, 3),
            "steps_per_second": round(serving.env_steps / seconds, 1),
            "return_mean_100": serving.return_mean_100,
            "policy_lag_mean": round(learning.policy_lag.mean, 3),
            "learner_wait_fraction": round(learning.wait_fraction, 4),
            "inference_batch_mean": round(serving.batch_mean, 2),
            "trouble": trouble(serving, learning),
            "seconds_by_stage": {
                "server": _rounded(serving.serving_seconds),
                "learner": _rounded(learning.learner_seconds),
            },
            "seed": self.config.seed,
        }

    def _check_memory(self, spec: EnvSpec) -> None:
        """Refuses spaces whose store would not fit; runs in the server thread for the first actor's."""
        needed = Store.bytes_needed(spec, **store_sizes(self.config, core_size=2 * self.config.model.lstm))
        free = free_bytes(self.device)
        if free is not None and needed > free:
            raise Mismatch(
                f"spaces: the store for {spec} needs {needed / 2**20:,.0f} MiB and {free / 2**20:,.0f} MiB are free; "
                "lower serving.max_slots, store.capacity or algorithm.unroll_length on the learner"
            )

    # The threads.

    def _run_learner(self) -> None:
        """A thread that dies takes the process with it."""
        torch.set_flush_denormal(True)  # of this thread: vanishing gradients would cost a tenth of an update
        try:
            with own_stream(self.device):
                after_serving(self.device)  # that is, after everything was built
                self._learn()
        except BaseException as error:
            self._thread_died(error)

    def _thread_died(self, error: BaseException) -> None:
        name = threading.current_thread().name
        failure = error if isinstance(error, SeedrlError) else ThreadDied(f"thread {name} died: {error!r}")
        failure.__cause__ = error if failure is not error else None
        self.stop.ask("failed", str(failure), failure)

    async def _serve_batches(self) -> None:
        """Runs in the server thread."""
        torch.set_flush_denormal(True)  # of this thread, as in the learner's
        await self.batches.run()

    def _is_in_step(self) -> bool:
        """Lock-step: no further step before every update that the finished unrolls allow."""
        due = self.first_version + self.store.completed // self.config.algorithm.batch_size
        return self.policy.version >= due

    def _learn(self) -> None:
        while not self.stop.is_set():
            if self.learner.update(POLL_SECONDS):
                self._check_whether_done()
                if time.monotonic() - self.saved > self.config.checkpoint.seconds:
                    self._save()
                self.learner.publish()
                self.batches.wake()

    def _check_whether_done(self) -> None:
        stop, serving = self.config.stop, self.serving
        score, target = serving.return_mean_100, stop.return_mean_100
        if target is not None and score is not None and score >= target and len(serving.returns) == 100:
            self.stop.ask("done", f"Solved: mean return {score:.2f} reached the target of {target:g}")
        if serving.env_steps >= stop.env_steps:
            self.stop.ask("done", f"Done: {serving.env_steps:,} of {stop.env_steps:,} steps")

    def _save(self) -> None:
        """Runs in the learner thread, and in the main thread once that has ended."""
        self.saved = time.monotonic()
        timer = Stopwatch(self.learning.learner_seconds)
        snapshot = self.resumable.take(self.seconds_before + self.saved - self.began)
        try:
            checkpoints.save(
                self.run_directory.checkpoints, self.serving.env_steps, snapshot, keep=self.config.checkpoint.keep
            )
            self.learning.checkpoint_timestamp_seconds = time.time()
            self.learning.checkpoint_seconds.observe(timer.lap("checkpoint") - self.saved)
        except OSError as error:
            self.learning.checkpoints_failed += 1
            self.display.say(f"learner: no checkpoint could be written ({error}); the one before is intact")


def run_learner(config: LearnerConfig) -> dict[str, Any]:
    """`seedrl learner`: serves until done; SIGINT and SIGTERM end it in order, a second one at once."""
    service = LearnerService(config)

    signals: list[int] = []

    def interrupt(reason: str) -> None:
        service.stop.ask("interrupted", reason)
        service.display.say(f"learner: {reason}; stopping in order, once more to end at once")

    def handle(number: int, _: Any) -> None:
        signals.append(number)
        if len(signals) > 1:
            os._exit(128 + number)
        # In a thread: the one interrupted may hold the very locks that this takes.
        reason = f"Interrupted by {signal.Signals(number).name}"
        threading.Thread(target=interrupt, args=(reason,), name="stop").start()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return service.run()


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {stage: round(value, 3) for stage, value in seconds.items()}
