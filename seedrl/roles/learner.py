"""The learner process: builds its parts, names its threads, shuts them down in order.

server      reads streams, runs batches, answers  serving/server.py, batches.py, inference.py
learner     trains, publishes, checkpoints        learning/learner.py
metrics     serves pages over HTTP                monitoring/endpoint.py
main        shows progress, handles signals       here
"""

import contextlib
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seedrl.actions import Actions
from seedrl.config import LearnerConfig, serving_ranks, store_sizes, torch_threads
from seedrl.device import after_serving, choose_device, own_stream
from seedrl.errors import Diverged, Mismatch, RankLost, SeedrlError, ThreadDied
from seedrl.learning.learner import Learner
from seedrl.metrics import LearningMetrics, ServingMetrics, Stopwatch
from seedrl.models.base import core_size_of
from seedrl.models.build import build_model
from seedrl.monitoring.monitor import Monitor
from seedrl.policy import Policy
from seedrl.ranks.agreement import Load, Progress, Vote
from seedrl.ranks.group import Ranks
from seedrl.ranks.identity import ALONE, Identity
from seedrl.ranks.rounds import Voting, progress_of
from seedrl.ranks.separate import TRAINING, RemoteLearner
from seedrl.ranks.settings import directory_of, generator_seed
from seedrl.roles.trainer import TrainerProcess
from seedrl.run.budget import budget_of, check_budget, check_store
from seedrl.run.context import ContextFile, State
from seedrl.run.membership import Membership
from seedrl.run.progress import ProgressDisplay, closing_words, console
from seedrl.run.saving import Saver
from seedrl.run.snapshot import (
    Resumable,
    initial_weights,
    load_weights,
    share_checkpoint,
    spec_of,
)
from seedrl.run.stopping import Stop, stop_on_signals
from seedrl.run.summary import summarize
from seedrl.run.totals import Counts, counts_of, joined, restore_counters
from seedrl.serving.balance import Endpoint
from seedrl.serving.service import InferenceService
from seedrl.serving.sessions import session_seed
from seedrl.specs import EnvSpec, decoded_spec, encoded_spec
from seedrl.store import Store
from seedrl.validation import check
from seedrl.wire.messages import Command

POLL_SECONDS = 0.1  # how long a thread waits before it looks whether to stop
LOOK_SECONDS = 0.5
STOP_SECONDS = 8.0  # for the threads to end: less than a supervisor waits


class LearnerProcess:
    """One learner process. Everything here runs in the main thread unless it says otherwise."""

    def __init__(self, config: LearnerConfig, identity: Identity = ALONE) -> None:
        check(config)
        self.device = choose_device(config.device, identity.local_rank)
        self.stop = Stop(on_stop=self._turn_away)
        self.ranks = Ranks.join(identity, self.device, config.ranks.timeout)
        self.run_directory, config = directory_of(config, identity.rank, self.ranks.share)
        self.config = config
        self.serving = ServingMetrics()
        self.learning = LearningMetrics()
        self.display = ProgressDisplay(config, console(self._log()), identity)
        self.saver = Saver(config.checkpoint, self.run_directory.checkpoints, self.learning, say=self.display.say)
        self.checkpoint = share_checkpoint(self.ranks, self.saver.load() if identity.is_first else None)
        self.resumed_at = self.checkpoint.state["learning"]["updates"] if self.checkpoint is not None else 0
        self.front = InferenceService(
            config,
            self.serving,
            job_seed=partial(session_seed, config.seed, self.resumed_at, rank=identity.rank),
            on_failure=self._thread_died,
            say=self.display.say,
            describe=lambda: self.monitor.status(),
            check_spec=partial(check_store, config, self.device),
        )
        self.sessions, self.batcher, self.server = self.front.sessions, self.front.batcher, self.front.server
        self.balance = self.front.balance
        self.addresses: list[str] = []  # of the ranks' endpoints, once they are open
        if self.checkpoint is not None:
            restore_counters(self.checkpoint.state, self.serving, self.learning, identity.rank)
            self.sessions.agree(spec_of(self.checkpoint))
        context_file = ContextFile(self.run_directory.path)
        self.rounds = Voting(self.ranks, self.stop, config.stop, own=self._said)
        self.rounds.on_loads = self._see_endpoints
        self.monitor = Monitor(
            config,
            self.run_directory,
            self.serving,
            self.learning,
            self.sessions,
            self.batcher,
            say=self.display.say,
            desired_before=context_file.read_or_new().desired_actors,
            identity=identity,
            progress=self._shown_progress,
        )
        self.monitor.device = str(self.device)
        self.membership = Membership(
            context_file,
            self.sessions,
            self.serving,
            self.learning,
            newest_checkpoint=lambda: self.saver.newest,
            desired_actors=lambda: self.monitor.desired_actors,
            progress=self._shown_progress,
        )
        self.learner_thread = threading.Thread(target=self._run_learner, name="learner", daemon=True)
        self.seconds_before = 0.0  # of this run, in earlier processes
        self.began = time.monotonic()

    def run(self) -> dict[str, Any]:
        """Serves and trains until it is done or asked to stop; returns the summary."""
        try:
            if self.checkpoint is not None:  # first, so that actors who find the port find somebody who serves them
                self._build(self.sessions.spec.result())
            address = self._open()
            if self.checkpoint is None and self._wait_for_spaces(address):
                self._build(self.sessions.spec.result())
            if self.rounds.go_on() and not self.rounds.stop_if_done():  # a resumed run may be done already
                self._start_threads()
                self._watch()
        except BaseException as error:
            self.stop.ask("failed", str(error), error)
        summary = self._shut_down()
        self.ranks.leave()
        if self.stop.failure is not None:
            raise self.stop.failure
        if self.learning.updates:
            self.display.say(closing_words(summary, str(self.run_directory.path)))
        return summary

    def _said(self) -> Vote:
        """To the other ranks, in a round of agreement."""
        return Vote(
            is_idle=self._is_idle,
            is_save_due=self.saver.is_due,
            knows_spaces=self.sessions.spec.done(),
            progress=progress_of(self.serving, serving_ranks(self.config)),
            load=Load() if self.ranks.is_alone else Load(*self.balance.own()[1:]),
        )

    @property
    def _is_idle(self) -> bool:
        """Whether it has no actors, so that other ranks need not wait for its train batches."""
        return not self.config.ranks.separate and not self.sessions.slots_taken

    def _see_endpoints(self, loads: Sequence[Load]) -> None:
        """What the others have said of theirs, in every round."""
        if len(self.addresses) > 1:
            self.balance.see([Endpoint(address, *load) for address, load in zip(self.addresses, loads, strict=True)])

    def _log(self) -> Path | None:
        """Where a rank speaks that is not the first; that one has the terminal."""
        return None if self.ranks.is_first else self.run_directory.logs / "learner.log"

    def _shown_progress(self) -> Progress | None:
        """Rank 0 shows that of all ranks; each of the others its own."""
        return self.rounds.progress if self.ranks.is_first and not self.ranks.is_alone else None

    @property
    def _seconds(self) -> float:
        """That the run has taken so far."""
        return self.seconds_before + time.monotonic() - self.began

    def _turn_away(self) -> None:
        """Not ready any more, for whoever looks; runs in the thread that asks to stop."""
        self.monitor.is_draining = True
        self.server.set_ready(False)

    def _open(self) -> str:
        """Actors and people can find the learner from now on; returns where."""
        address = self.monitor.listen = self.server.start()
        self.monitor.start()
        near = self.config.socket or address  # what people on this machine can reach without TLS
        self.membership.begin(near, self.monitor.address)
        self.display.say(f"learner: serving {self.config.env.id} at {address}; run directory {self.run_directory.path}")
        if self.monitor.address:
            self.display.say(f"learner: live page at http://{self.monitor.address}/, metrics at /metrics")
        self.addresses = self.ranks.gather(self.balance.address)
        return address

    def _wait_for_spaces(self, address: str) -> bool:
        """Waits for the first actor, which tells the spaces; false if asked to stop before."""
        waiting_since = time.monotonic()
        told = False
        while self.rounds.go_on():
            if self.rounds.agreed.first_with_spaces is not None:
                self._agree_on_spaces(self.rounds.agreed.first_with_spaces)
                return True
            self.stop.wait(POLL_SECONDS)
            self.membership.tick()
            if not told and time.monotonic() - waiting_since > 5:
                self.display.say(f"learner: waiting for actors; start one with: seedrl actor learner={address}")
                told = True
        return False

    def _agree_on_spaces(self, source: int) -> None:
        """One rank has been told the spaces, and tells the others."""
        own = self.sessions.spec
        spec = decoded_spec(self.ranks.share(encoded_spec(own.result()) if own.done() else {}, source=source))
        self.front.agree(spec)
        if own.result() != spec:
            rank = self.ranks.identity.rank
            raise Mismatch(f"spaces: rank {source} trains on {spec}; the actors of rank {rank} have {own.result()}")

    def _build(self, spec: EnvSpec) -> None:
        config = self.config
        device = self.device
        torch.set_num_threads(torch_threads(config))
        actions = Actions(spec, config.model.squash)
        model = build_model(config.model, spec.stacked(config.env.frame_stack), config.seed).to(device)
        core_size = core_size_of(model)
        budget = budget_of(config, spec, model, core_size)
        check_budget(budget, device)
        self.store = Store(spec, **store_sizes(config, core_size), device=device)
        rank = self.ranks.identity.rank
        generator = torch.Generator(device).manual_seed(generator_seed(config.seed, rank, self.resumed_at))
        policy = Policy(model, version=0)
        self.policy = policy
        self.learner = self._learner(model, actions, policy)
        self.resumable = Resumable(self.learner, generator, spec)
        self.front.build(
            policy,
            actions,
            self.store,
            core_size=core_size,
            generator=generator,
            device=device,
            may_go_on=self._is_in_step if config.lockstep else lambda: True,
        )
        self.batches, self.inference = self.front.batches, self.front.inference
        self._restore()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self.display.say(
            f"learner: {spec}; {parameters:,} parameters on {device}; {budget} for {config.serving.max_slots} slots "
            f"and {self.store.capacity} finished unrolls"
        )

    def _learner(self, model: nn.Module, actions: Actions, policy: Policy) -> Learner | RemoteLearner:
        """Or what stands for one, if another rank trains."""
        config = self.config
        if config.ranks.separate:
            return RemoteLearner(self.ranks, model, self.store, policy, self.learning, config.algorithm.batch_size)
        return Learner(
            config,
            model,
            actions,
            self.store,
            policy,
            self.learning,
            env_steps=lambda: self.rounds.progress.env_steps,
            ranks=self.ranks,
        )

    def _restore(self) -> None:
        """Takes up the newest checkpoint of the run directory, or the weights of `init_from`; those are rank 0's."""
        if self.checkpoint is not None:
            self.seconds_before = self.resumable.restore(self.checkpoint, self.ranks.is_first)
            self.display.say(f"learner: resumed at {self.serving.env_steps:,} steps, {self.learning.updates:,} updates")
        elif self.config.init_from and self.ranks.is_first:
            load_weights(self.learner.model, initial_weights(self.config.init_from, warn=self.display.say))
            self.display.say(f"learner: initial weights from {self.config.init_from}")
        if self.checkpoint is None:
            self.ranks.spread(self.learner.model.state_dict().values())
        self.saver.begin()
        self.first_version = self.learning.updates
        self.learner.publish()

    def _start_threads(self) -> None:
        self.began = time.monotonic()
        self.monitor.begin(self.store, self.policy, self.batches, self.seconds_before)
        self.learner_thread.start()
        self.front.begin(on_ready=self._become_ready)

    def _watch(self) -> None:
        while not self.stop.wait(LOOK_SECONDS):
            self.display.show(self.monitor.look())
            self.server.set_live(self.monitor.is_alive)
            self.server.rebalance()
            if self.monitor.is_ready:
                self.membership.serve(is_training=self.learning.updates > self.first_version)
            self.membership.tick()

    def _shut_down(self) -> dict[str, Any]:
        """Threads first, so that nothing moves any more; then the checkpoint; then the actors."""
        failed = self.stop.failure is not None
        self.membership.enter(State.FAILED if failed else State.DRAINING, self.stop.reason)
        was_running = self.front.has_begun
        if was_running:
            self._join_threads()
        counts = self._save_last() if was_running and self.stop.failure is None else None
        over = self.stop.status == "done"
        command = Command.END if over else Command.DRAIN
        self.server.stop(command, self.stop.reason)
        self.display.close()
        summary = summarize(self.config, self.stop, counts or counts_of(self.serving, self.learning), self._seconds)
        if was_running or self.checkpoint is None:  # else nothing happened since the summary that is there
            with contextlib.suppress(OSError):  # a full disk; the words at the end say the same
                self.run_directory.write_summary(summary)
        self.membership.enter(State.DONE if self.stop.failure is None else State.FAILED, self.stop.reason)
        try:
            self.monitor.close(summary, is_coming_back=isinstance(self.stop.failure, RankLost))
        except Exception as error:  # the run is over and saved: no reason for it to fail
            self.display.say(f"learner: its measurements could not be finished ({error!r})")
        self.run_directory.release()
        return summary

    def _save_last(self) -> Counts | None:
        """The threads of this rank have ended, and so do the others'. Rank 0 learns what all of them have counted."""
        try:
            counts = self._save()
        except RankLost as error:  # the run goes on from the checkpoint before
            self.stop.fail(error)
            return None
        return counts if self.ranks.is_first and not self.ranks.is_alone else None

    def _join_threads(self) -> None:
        """Serving pauses and the learner ends, each in time."""
        self.front.pause()
        deadline = time.monotonic() + STOP_SECONDS
        self.learner_thread.join(STOP_SECONDS)
        if self.learner_thread.is_alive():
            self.stop.fail(ThreadDied(f"thread learner did not stop within {STOP_SECONDS:.0f} s"))
        if not self.front.wait(max(0.0, deadline - time.monotonic())):
            self.stop.fail(ThreadDied(f"thread server did not stop within {STOP_SECONDS:.0f} s"))

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

    def _become_ready(self) -> None:
        """Runs in the server thread."""
        if not self.stop.is_set():
            self.monitor.is_ready = True
            self.server.set_ready(True)

    def _is_in_step(self) -> bool:
        """Lock-step: no further step before every update that the finished unrolls allow, and none after the last."""
        algorithm = self.config.algorithm
        due = self.first_version + self.store.completed // algorithm.batch_size * algorithm.passes
        return self.policy.version >= due and not self.stop.is_set()

    def _learn(self) -> None:
        """Updates are everybody's or nobody's: there is one after a round in which all ranks are ready for it."""
        while self._go_on(self.learner.has_batch(self._patience)):
            if self.rounds.agreed.is_update_due:
                self._update()
                self.rounds.stop_if_done()
                if not self.learner.skipped_in_a_row:
                    if self.rounds.agreed.is_save_due:
                        self._save()
                elif self.learner.has_diverged:
                    raise self._diverged()
                self.learner.publish()
                self.batches.wake()

    @property
    def _patience(self) -> float:
        """How long to wait for a train batch. A rank without actors goes on with the others, if there are any."""
        return 0.0 if self._is_idle and not self.rounds.agreed.are_all_idle else POLL_SECONDS

    def _update(self) -> None:
        if not self.learner.update():
            assert isinstance(self.learner, Learner)  # if another rank trains, this one has to have a batch
            self.learner.assist(self.store.blank(self.config.algorithm.batch_size))

    def _go_on(self, has_batch: bool) -> bool:
        """A round; a rank that waits for others waits for unrolls, theirs."""
        timer = Stopwatch(self.learning.learner_seconds)
        goes_on = self.rounds.go_on(has_batch)
        timer.lap("wait")
        return goes_on

    def _diverged(self) -> Diverged:
        outlook = self.saver.roll_back() if self.ranks.is_first else "rank 0 says where the run would go on"
        return Diverged(
            f"the loss or the gradient of {self.learner.skipped_in_a_row} updates in a row was not finite; "
            f"{outlook}; lower algorithm.learning_rate or algorithm.max_grad_norm if that happens again"
        )

    def _save(self) -> Counts:
        """A checkpoint, written by rank 0; returns what all ranks have counted."""
        self.learner.sync()
        counts = joined(self.ranks.gather(counts_of(self.serving, self.learning)))
        if self.ranks.is_first:
            self.saver.save(lambda: self.resumable.take(self._seconds, counts))
        return counts


def run_learner(config: LearnerConfig, identity: Identity) -> None:
    """`seedrl learner`: serves until done; SIGINT and SIGTERM end it in order, a second one at once."""
    if config.ranks.separate and identity.rank == TRAINING:
        TrainerProcess(config, identity).run()
        return
    service = LearnerProcess(config, identity)
    stop_on_signals(service.stop, service.display.say)
    service.run()
