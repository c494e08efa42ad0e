"""A learner process that is one of several *ranks*, which train one model together. roles/peers.py has the interface.

Each rank has an endpoint and actors of its own, except with `ranks.separate`.
"""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from seedrl.algorithms.base import Algorithm, networks_of
from seedrl.config import LearnerConfig
from seedrl.errors import Mismatch
from seedrl.learning.learner import Learner
from seedrl.metrics import LearningMetrics, ServingMetrics
from seedrl.ranks.activity import ActorActivity
from seedrl.ranks.agreement import Load, Vote
from seedrl.ranks.averaging import RankAverager
from seedrl.ranks.group import Ranks
from seedrl.ranks.rounds import VotingRounds
from seedrl.ranks.separate import RemoteLearner
from seedrl.ranks.settings import directory_of, generator_seed
from seedrl.run.checkpoint import Checkpoint
from seedrl.run.directory import RunDirectory
from seedrl.run.saving import Saver
from seedrl.run.stopping import Progress, Stop
from seedrl.run.totals import Counts, sum_over_ranks
from seedrl.serving.balance import LearnerEndpoint
from seedrl.serving.service import InferenceService
from seedrl.sizes import serving_ranks
from seedrl.specs import EnvSpec, decoded_spec, encoded_spec
from seedrl.types import Ticket


class RankPeers:
    """Owned by the main thread, and by the learner thread while that runs."""

    def __init__(self, config: LearnerConfig, ranks: Ranks) -> None:
        self.identity = ranks.identity
        self._config = config
        self._ranks = ranks
        self._addresses: list[str] = []  # of the ranks' endpoints, once they are open
        self._rounds: VotingRounds | None = None

    def open_run(self, config: LearnerConfig) -> tuple[RunDirectory, LearnerConfig]:
        return directory_of(config, self.identity.rank, self._ranks.broadcast_object)

    def share_checkpoint(self, checkpoint: Checkpoint | None) -> Checkpoint | None:
        return share_checkpoint(self._ranks, checkpoint)

    def rounds(self, stop: Stop, service: InferenceService, serving: ServingMetrics, saver: Saver) -> VotingRounds:
        activity = ActorActivity(service.sessions, service.batcher, serving)

        def vote() -> Vote:
            return Vote(
                is_idle=not self._config.ranks.separate and activity.is_idle(),
                is_save_due=saver.is_due,
                knows_spaces=service.sessions.spec.done(),
                progress=Progress.of(serving, serving_ranks(self._config)),
                load=Load(*service.balance.own()[1:]),
            )

        def see(loads: Sequence[Load]) -> None:
            if len(self._addresses) > 1:
                endpoints = zip(self._addresses, loads, strict=True)
                service.balance.see([LearnerEndpoint(address, *load) for address, load in endpoints])

        self._rounds = VotingRounds(self._ranks, stop, self._config.stop, vote, on_loads=see)
        return self._rounds

    def announce(self, address: str) -> None:
        self._addresses = self._ranks.all_gather_object(address)

    def agreed_spec(self, service: InferenceService) -> EnvSpec | None:
        """The first rank that knows the spaces sends them to the others, and all have a round about them.

        A rank that cannot hold them, or whose actors have other spaces, votes to fail, so that all ranks end.
        """
        assert self._rounds is not None
        source = self._rounds.decision.first_with_spaces
        if source is None:
            return None
        own = service.sessions.spec
        known = encoded_spec(own.result()) if own.done() else {}
        spec = decoded_spec(self._ranks.broadcast_object(known, source=source))
        service.agree(spec)  # if it refuses them, it asks to stop
        if own.done() and own.result() != spec:
            rank = self.identity.rank
            words = f"spaces: rank {source} trains on {spec}; the actors of rank {rank} have {own.result()}"
            self._rounds.stop.fail(Mismatch(words))
        return spec if self._rounds.agree() else None

    def generator_seed(self, seed: int, earlier_processes: int) -> int:
        return generator_seed(seed, self.identity.rank, earlier_processes)

    def learner(
        self,
        config: LearnerConfig,
        model: nn.Module,
        algorithm: Algorithm,
        metrics: LearningMetrics,
        *,
        env_steps: Callable[[], int],
        prefer: Callable[[Ticket, Tensor], None],
    ) -> Learner | RemoteLearner:
        if config.ranks.separate:
            return RemoteLearner(self._ranks, model, metrics, prefer)
        networks = networks_of(algorithm)
        self._ranks.broadcast(networks.state_dict().values())
        averager = RankAverager(self._ranks, model, networks, config.ranks.sync_every)
        return Learner(config, model, algorithm, metrics, env_steps=env_steps, prefer=prefer, averager=averager)

    def same_weights(self, model: nn.Module) -> None:
        self._ranks.broadcast(model.state_dict().values())

    def total(self, counts: Counts) -> Counts:
        return sum_over_ranks(self._ranks.all_gather_object(counts))

    def shown_progress(self) -> Progress | None:
        """Return the progress of all ranks on rank 0; the others show their own."""
        return self._rounds.progress if self.identity.is_first and self._rounds is not None else None

    def leave(self) -> None:
        self._ranks.leave()


def share_checkpoint(ranks: Ranks, checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Return rank 0's checkpoint on all ranks, so that only its machine needs the run directory."""
    state = ranks.broadcast_object(None if checkpoint is None else checkpoint.state)
    if state is None:
        return None
    tensors = ranks.broadcast_tensors({} if checkpoint is None else checkpoint.tensors)
    return Checkpoint(tensors, state, None if checkpoint is None else checkpoint.store)
