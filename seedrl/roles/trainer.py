"""Rank 1 of `ranks.separate`: it trains on what rank 0 records, and serves nobody. All of it runs in the main thread.

It takes rank 0's collective steps in rank 0's order (service.py has the other side): directory, checkpoint, addresses,
spaces, and then rounds, each of which may be followed by an update.
"""

import torch

from seedrl.actions import Actions
from seedrl.config import LearnerConfig, torch_threads
from seedrl.device import choose_device, own_stream
from seedrl.errors import Diverged, SeedrlError
from seedrl.learning.learner import Learner
from seedrl.metrics import LearningMetrics, ServingMetrics, Stopwatch
from seedrl.models.build import build_model
from seedrl.ranks.agreement import Vote
from seedrl.ranks.group import Ranks
from seedrl.ranks.identity import Identity
from seedrl.ranks.rounds import Voting
from seedrl.ranks.separate import TRAINING, Inbox, Outbox, tell
from seedrl.ranks.settings import directory_of
from seedrl.run import checkpoint as files
from seedrl.run.progress import ProgressDisplay, console
from seedrl.run.snapshot import load_weights, share_checkpoint, spec_of
from seedrl.run.stopping import Stop, stop_on_signals
from seedrl.run.totals import counts_of, restore_counters
from seedrl.specs import EnvSpec, decoded_spec
from seedrl.validation import check


class TrainerProcess:
    """Owned by the main thread, and the only one."""

    def __init__(self, config: LearnerConfig, identity: Identity) -> None:
        check(config)
        self.device = choose_device(config.device, identity.local_rank)
        self.ranks = Ranks.join(identity, self.device, config.ranks.timeout)
        self.run_directory, self.config = directory_of(config, identity.rank, self.ranks.share)
        self.display = ProgressDisplay(self.config, console(self.run_directory.logs / "learner.log"), identity)
        self.stop = Stop()
        self.learning = LearningMetrics()
        self.checkpoint = share_checkpoint(self.ranks, None)
        self.rounds = Voting(self.ranks, self.stop, config.stop, own=Vote)
        stop_on_signals(self.stop, self.display.say)

    def run(self) -> None:
        """Trains until the run is done, or somebody wants to stop."""
        try:
            if self.checkpoint is not None:
                restore_counters(self.checkpoint.state, ServingMetrics(), self.learning)
                self._build(spec_of(self.checkpoint))
            self.ranks.gather("")  # addresses: actors find rank 0
            if self.checkpoint is not None or self._wait_for_spaces():
                self._train()
        except SeedrlError as error:
            self.stop.fail(error)
            raise
        finally:
            self.display.say(f"learner: {self.stop.reason}")
            self.run_directory.release()
        self.ranks.leave()
        if self.stop.failure is not None:
            raise self.stop.failure

    def _wait_for_spaces(self) -> bool:
        """Builds as soon as rank 0 knows the spaces; false if asked to stop before."""
        while self.rounds.go_on():
            if self.rounds.agreed.first_with_spaces is not None:
                self._build(decoded_spec(self.ranks.share({}, source=self.rounds.agreed.first_with_spaces)))
                return True
        return False

    def _build(self, spec: EnvSpec) -> None:
        config = self.config
        torch.set_num_threads(torch_threads(config))
        torch.set_flush_denormal(True)
        model = build_model(config.model, spec.stacked(config.env.frame_stack), config.seed).to(self.device)
        self.learner = Learner(
            config,
            model,
            Actions(spec, config.model.squash),
            Inbox(self.ranks, spec, self.device),
            Outbox(self.ranks),
            self.learning,
            env_steps=lambda: self.rounds.progress.env_steps,
        )
        if self.checkpoint is None:
            self.ranks.spread(model.state_dict().values())
        else:
            load_weights(model, self.checkpoint)
            files.unpack_optimizer(self.learner.optimizer, files.without_prefix("optimizer", self.checkpoint.tensors))
        self.learner.publish()
        self.display.say(f"learner: trains on {self.device}, from {self.learning.updates:,} updates on")

    def _train(self) -> None:
        if not self.rounds.go_on() or self.rounds.stop_if_done():
            return
        with own_stream(self.device):
            while self._go_on():
                if self.rounds.agreed.is_update_due:
                    self._update()
        if self.stop.failure is None:
            self._save()

    def _go_on(self) -> bool:
        timer = Stopwatch(self.learning.learner_seconds)
        goes_on = self.rounds.go_on(has_batch=True)
        timer.lap("wait")
        return goes_on

    def _update(self) -> None:
        learner = self.learner
        learner.update()
        tell(self.ranks, self.learning, learner.skipped_in_a_row)
        self.rounds.stop_if_done()
        if not learner.skipped_in_a_row:
            if self.rounds.agreed.is_save_due:
                self._save()
        elif learner.has_diverged:
            raise Diverged("updates were not finite again and again; rank 0 says where the run would go on")
        learner.publish()

    def _save(self) -> None:
        """Rank 0 writes it, and counts for both."""
        self.ranks.gather(counts_of(ServingMetrics(), LearningMetrics()))
        self.ranks.share_tensors(self.learner.tensors(), TRAINING)
