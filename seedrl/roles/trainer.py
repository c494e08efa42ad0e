"""Rank 1 of `ranks.separate`: it trains on what rank 0 records, and serves no actors. Runs in the main thread.

It calls the same collective operations as rank 0 (roles/learner.py), in the same order: directory, checkpoint,
addresses, spaces, and then rounds, each of which may be followed by an update.
"""

import torch

from seedrl.actions import Actions
from seedrl.algorithms.build import build_algorithm
from seedrl.algorithms.neutral import resolve
from seedrl.config import LearnerConfig
from seedrl.device import choose_device, learning_stream
from seedrl.errors import Diverged, SeedrlError
from seedrl.learning.learner import Learner
from seedrl.learning.loop import TrainingLoop
from seedrl.metrics import LearningMetrics, ServingMetrics
from seedrl.models.build import build_run_model
from seedrl.ranks.agreement import Vote
from seedrl.ranks.group import Ranks
from seedrl.ranks.peers import share_checkpoint
from seedrl.ranks.rounds import VotingRounds
from seedrl.ranks.separate import TRAINING, Inbox, MirroredLearner, Outbox, Preferences
from seedrl.ranks.settings import directory_of
from seedrl.run.identity import Identity
from seedrl.run.progress import ProgressDisplay, console
from seedrl.run.snapshot import load_weights, spec_of
from seedrl.run.stopping import Stop, stop_on_signals
from seedrl.run.totals import counts_of, restore_counters
from seedrl.sizes import torch_threads
from seedrl.specs import EnvSpec, decoded_spec
from seedrl.validation import check


class TrainerProcess:
    """Owned by the main thread; there is no other."""

    def __init__(self, config: LearnerConfig, identity: Identity) -> None:
        check(config)
        self.device = choose_device(config.device, identity.local_rank)
        self.ranks = Ranks.join(identity, self.device, config.ranks.timeout)
        self.run_directory, self.config = directory_of(config, identity.rank, self.ranks.broadcast_object)
        self.display = ProgressDisplay(self.config, console(self.run_directory.logs / "learner.log"), identity)
        self.stop = Stop()
        self.learning = LearningMetrics()
        self.checkpoint = share_checkpoint(self.ranks, None)
        self.rounds = VotingRounds(self.ranks, self.stop, config.stop, own_vote=Vote)
        stop_on_signals(self.stop, self.display.say)

    def run(self) -> None:
        """Train until the run is done or a rank asks to stop."""
        try:
            with learning_stream(self.device):
                self._build_and_train()
        except SeedrlError as error:
            self.stop.fail(error)
            raise
        finally:
            self.display.say(f"learner: {self.stop.reason}")
            self.run_directory.release()
        self.ranks.leave()
        if self.stop.failure is not None:
            raise self.stop.failure

    def _build_and_train(self) -> None:
        if self.checkpoint is not None:
            restore_counters(self.checkpoint.state, ServingMetrics(), self.learning)
            self._build(spec_of(self.checkpoint))
        self.ranks.all_gather_object("")  # addresses; this rank has none, as actors connect to rank 0
        if self.checkpoint is not None or self._wait_for_spaces():
            self._train()

    def _wait_for_spaces(self) -> bool:
        """Build as soon as rank 0 knows the spaces; return false if asked to stop before."""
        while self.rounds.agree():
            if (source := self.rounds.decision.first_with_spaces) is not None:
                spec = decoded_spec(self.ranks.broadcast_object({}, source=source))
                if self.rounds.agree():  # unless rank 0 refuses them
                    self._build(spec)
                    return True
        return False

    def _build(self, spec: EnvSpec) -> None:
        config = resolve(self.config, spec)
        torch.set_num_threads(torch_threads(config))
        torch.set_flush_denormal(True)
        model, preferences = build_run_model(config, spec, self.device), Preferences()
        self.learner = Learner(
            config,
            model,
            build_algorithm(config.algorithm, Actions(spec, config.model.squash), model),
            self.learning,
            env_steps=lambda: self.rounds.progress.env_steps,
            prefer=preferences.prefer,
        )
        outbox = Outbox(self.ranks)
        self.loop = TrainingLoop(
            Inbox(self.ranks, spec, self.device),
            MirroredLearner(self.ranks, self.learner, self.learning, preferences),
            outbox,
            self.rounds,
            self.learning,
            batch_size=config.algorithm.batch_size,
            save=self._save,
            diverged=lambda skipped: Diverged(
                f"{skipped} updates in a row were not finite; rank 0 reports where the run resumes"
            ),
        )
        if self.checkpoint is None:
            self.ranks.broadcast(model.state_dict().values())
        else:
            load_weights(model, self.checkpoint)
            self.learner.load(self.checkpoint.tensors)
        self.learner.publish(outbox)
        self.display.say(f"learner: trains on {self.device}, resuming at {self.learning.updates:,} updates")

    def _train(self) -> None:
        if not self.rounds.agree() or self.rounds.stop_if_done():
            return
        self.loop.run()
        if self.stop.failure is None:
            self._save()

    def _save(self) -> None:
        """Send what a checkpoint needs. Rank 0 writes it, and has the counters of both."""
        self.ranks.all_gather_object(counts_of(ServingMetrics(), LearningMetrics()))
        self.ranks.broadcast_tensors(self.learner.tensors(), TRAINING)
