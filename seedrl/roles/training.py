"""The part of a learner process that needs the spaces: model, store, learner and loop, and the thread that trains."""

import threading
from functools import partial
from typing import Protocol

import torch

from seedrl.actions import Actions
from seedrl.algorithms.base import Algorithm
from seedrl.algorithms.build import build_algorithm
from seedrl.algorithms.neutral import resolve
from seedrl.algorithms.settings import described
from seedrl.algorithms.signs import signs_of
from seedrl.algorithms.teacher import Taught
from seedrl.config import LearnerConfig, StoreDevice
from seedrl.device import learning_stream
from seedrl.errors import ConfigError, Diverged, InvalidMessage, RunDirectoryError
from seedrl.learning.learner import Publisher
from seedrl.learning.loop import Rounds, Source, TrainingLoop
from seedrl.metrics import LearningMetrics, ServingMetrics
from seedrl.models.base import core_size_of
from seedrl.models.build import build_run_model
from seedrl.models.precision import is_low
from seedrl.policy import Policy
from seedrl.recordings.files import Content, Recording
from seedrl.recordings.places import place_of
from seedrl.recordings.recorder import UnrollRecorder
from seedrl.recordings.source import RecordedUnrolls
from seedrl.roles.opponents import build_league, load_teacher
from seedrl.roles.peers import Peers
from seedrl.run.budget import HOST, MIB, budget_of, check_budget, saved_unrolls
from seedrl.run.checkpoint import Checkpoint
from seedrl.run.directory import RunDirectory
from seedrl.run.events import Events
from seedrl.run.progress import ProgressDisplay
from seedrl.run.saving import Saver
from seedrl.run.snapshot import Resumable, count_parameters, initial_weights, load_weights
from seedrl.run.stopping import Stop
from seedrl.run.totals import Counts, RunClock, counts_of
from seedrl.selection.build import build_selector
from seedrl.serving.service import InferenceService
from seedrl.sizes import torch_threads
from seedrl.specs import EnvSpec, encoded_spec
from seedrl.store import Store, StoreSizes


class Process(Protocol):
    """The part of a learner process that does not need the spaces."""

    config: LearnerConfig
    device: torch.device
    run_directory: RunDirectory
    display: ProgressDisplay
    stop: Stop
    peers: Peers
    rounds: Rounds
    saver: Saver
    clock: RunClock
    serving: ServingMetrics
    learning: LearningMetrics
    events: Events
    inference: InferenceService
    recording: Recording | None  # what is trained on in place of what actors do

    def thread_died(self, error: BaseException) -> None: ...


class Training:
    """Built by the main thread, then owned by the learner thread, and by the main thread again once that has ended."""

    def __init__(self, process: Process, spec: EnvSpec) -> None:
        config, device, inference = resolve(process.config, spec), process.device, process.inference
        torch.set_num_threads(torch_threads(config))
        actions = Actions(spec, config.model.squash)
        model = build_run_model(config, spec, device)
        algorithm = build_algorithm(config.algorithm, actions, model)
        if config.teacher:
            teacher = load_teacher(config, spec, model, warn=process.display.say)
            algorithm = Taught(algorithm, teacher, actions, config.algorithm)
        sizes = StoreSizes.of(config, core_size_of(model), algorithm.overlap)
        budget = budget_of(config, spec, model, algorithm)
        check_budget(budget, device)
        self._process = process
        self._batch_size = config.algorithm.batch_size
        self.algorithm = described(config.algorithm)
        self.is_on_policy = config.lockstep or bool(config.algorithm.on_policy)
        self.signs = signs_of(algorithm)
        self.recorder = self._unroll_recorder(config, spec)
        self.store = self._store(config, spec, sizes, algorithm)
        self.policy = Policy(model, version=0)
        seed = process.peers.generator_seed(config.seed, process.run_directory.earlier_processes)
        seats, say = inference.sessions.seats, process.display.say
        parts = build_league(config, spec, model, self.policy, seats, process.serving, seed=seed, warn=say)
        self.league = parts.league if parts else None
        self.publisher: Publisher = parts.publisher if parts else self.policy
        self.learner = process.peers.learner(
            config,
            model,
            algorithm,
            process.learning,
            env_steps=lambda: process.rounds.progress.env_steps,
            prefer=self.store.prefer,
        )
        generator = torch.Generator(device).manual_seed(seed)
        kept = self.store if config.store.checkpoint else None
        self.resumable = Resumable(
            self.learner, generator, spec, config.algorithm, kept, parts.saved if parts else None
        )
        self.loop = TrainingLoop(
            self._source(config),
            self.learner,
            self.publisher,
            process.rounds,
            process.learning,
            batch_size=config.algorithm.batch_size,
            save=self.save,
            diverged=self._diverged,
            on_published=self._on_published,
        )
        inference.build(
            self.policy,
            actions,
            self.store,
            core_size=sizes.core_size,
            generator=generator,
            device=device,
            on_episodes=partial(process.events.episodes, is_evaluation=False),
            on_evaluated=partial(process.events.episodes, is_evaluation=True),
            may_continue=self._is_in_step if self.is_on_policy else lambda: True,
            fraction=self._fraction,
            league=self.league,
        )
        self.thread = threading.Thread(target=self._run, name="learner", daemon=True)
        saved = saved_unrolls(config, spec, sizes) if kept else 0
        process.display.say(
            f"learner: {self.algorithm} on {spec}; {count_parameters(model):,} parameters on {device}"
            f"{' in bfloat16' if is_low(model) else ''}; "
            f"{budget} for {sizes.slots} slots and {sizes.capacity} finished unrolls"
            + (f", of which checkpoints hold {saved / MIB:,.1f} MiB" if kept else "")
        )

    def _store(self, config: LearnerConfig, spec: EnvSpec, sizes: StoreSizes, algorithm: Algorithm) -> Store:
        process, is_by_priority = self._process, config.store.select == "priority"
        return Store(
            spec,
            build_selector(config, updates=lambda: process.learning.updates, fraction=self._fraction),
            sizes,
            process.device,
            on_free=process.inference.wake,
            priority_of=getattr(algorithm, "initial_priority", None) if is_by_priority else None,
            record=self.recorder.record if self.recorder is not None else None,
            memory=HOST if config.store.device is StoreDevice.host else process.device,
        )

    def _unroll_recorder(self, config: LearnerConfig, spec: EnvSpec) -> UnrollRecorder | None:
        """Return what records finished unrolls, if the settings say where."""
        if not config.store.dump:
            return None
        process, algorithm = self._process, config.algorithm
        content = Content(config.env.id, encoded_spec(spec), algorithm.unroll_length, config.env.frame_stack)
        folder = place_of("store.dump", config.store.dump) / f"rank-{process.peers.identity.rank}"
        return UnrollRecorder(
            folder,
            content,
            algorithm.name,
            most_bytes=config.store.dump_gb * 2**30,
            say=process.display.say,
            on_failure=process.thread_died,
        )

    def _source(self, config: LearnerConfig) -> Source:
        """Return the source of train batches: what actors fill the store with, or what was recorded."""
        process = self._process
        if process.recording is None:
            return self.store
        return RecordedUnrolls(
            process.recording, self.store, process.serving, config.seed, updates=lambda: process.learning.updates
        )

    def start(self) -> None:
        """Start the threads that train and record."""
        if self.recorder is not None:
            self.recorder.start()
        self.thread.start()

    def begin(self, checkpoint: Checkpoint | None) -> None:
        """Set the weights to begin with, and serve them."""
        process = self._process
        if checkpoint is None:
            self._set_initial_weights()
        else:
            is_first = process.peers.identity.is_first
            process.clock.seconds_before = self.resumable.restore(checkpoint, process.display.say, is_first)
            steps, updates = process.serving.env_steps, process.learning.updates
            process.display.say(f"learner: resumed at {steps:,} steps, {updates:,} updates")
        process.saver.begin()
        self.learner.publish(self.publisher)

    def _set_initial_weights(self) -> None:
        process = self._process
        if process.config.init_from and process.peers.identity.is_first:
            source = process.config.init_from
            weights = initial_weights(source, warn=process.display.say)
            try:
                load_weights(self.learner.model, weights)
            except RunDirectoryError as error:
                raise ConfigError(f"init_from={source}: {error}") from error
            process.display.say(f"learner: initial weights from {source}")
        process.peers.same_weights(self.learner.model)

    def _fraction(self) -> float:
        """Return how much of the run is over, for schedules."""
        return self._process.rounds.progress.env_steps / self._process.config.stop.env_steps

    def _is_in_step(self) -> bool:
        """Tell whether a step may follow: not while the learner could train or is training, nor after the last update.

        This holds for lock-step and on-policy runs, and is called by the server thread. The order matters: the learner
        stops being idle before it takes a train batch.
        """
        can_train = self.store.can_take(self._batch_size)
        return not can_train and self.loop.is_idle and not self._process.stop.is_set()

    # In the learner thread; `save` also in the main thread once that has ended.

    def _run(self) -> None:
        """A thread that dies takes the process with it."""
        torch.set_flush_denormal(True)  # of this thread: vanishing gradients would cost a tenth of an update
        try:
            with learning_stream(self._process.device):
                self.loop.run()
        except BaseException as error:
            self._process.thread_died(error)

    def _on_published(self) -> None:
        self._process.inference.wake()
        self._process.events.update(lambda: self._process.rounds.progress)

    def save(self) -> Counts:
        """Write a checkpoint, if this is the first process; return what all processes have counted."""
        process = self._process
        self.learner.sync()
        counts = process.peers.total(counts_of(process.serving, process.learning))
        if process.peers.identity.is_first:
            seconds = process.clock.seconds
            process.events.checkpoint(process.saver.save(lambda: self.resumable.take(seconds, counts)))
        return counts

    def _diverged(self, skipped: int) -> Diverged:
        is_first = self._process.peers.identity.is_first
        outlook = self._process.saver.roll_back() if is_first else "rank 0 reports where the run resumes"
        invalid = self._process.serving.sessions_evicted[InvalidMessage.reason]
        hint = f"; {invalid} sessions were ended for invalid messages: an environment may be broken" if invalid else ""
        return Diverged(
            f"the loss or the gradient of {skipped} updates in a row was not finite; "
            f"{outlook}; lower algorithm.learning_rate or algorithm.max_grad_norm if that happens again{hint}"
        )
