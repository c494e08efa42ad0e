"""Serves the policy of a run without learning, for `seedrl eval` and `seedrl serve`. Knows neither.

It is the serving half of a learner and nothing else. Every slot is one for evaluation, so nothing is recorded for long.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from seedrl.actions import Actions
from seedrl.bank import Bank
from seedrl.config import ActorsConfig, LeagueConfig, LearnerConfig, Match, ServingConfig
from seedrl.device import choose_device, learning_stream
from seedrl.errors import RunDirectoryError, ThreadDied
from seedrl.metrics import ServingMetrics
from seedrl.models.base import core_size_of
from seedrl.models.build import build_run_model
from seedrl.monitoring.reporting import actor_status
from seedrl.policy import Policy
from seedrl.roles.opponents import add_opponent
from seedrl.run.budget import check_budget, serving_budget
from seedrl.run.checkpoint import Checkpoint
from seedrl.run.directory import RunDirectory
from seedrl.run.snapshot import load_weights, spec_of
from seedrl.run.stopping import Stop
from seedrl.selection.fifo import Fifo
from seedrl.serving.league import League
from seedrl.serving.seats import GREEDY, ON_POLICY, OPPONENTS, Exploration, Seat, final_exploration
from seedrl.serving.service import InferenceService
from seedrl.serving.sessions import session_seed
from seedrl.serving.slots import FinishedEpisodes
from seedrl.sizes import learner_envs, torch_threads
from seedrl.status import Status, Verdict
from seedrl.store import Store, StoreSizes
from seedrl.tracebacks import failed
from seedrl.validation import check
from seedrl.version import __version__
from seedrl.wire.messages import Command

RANDOM = "random"  # the opponent that draws every choice with the same probability
AT_RANDOM = Exploration(epsilon=1.0)
STOP_SECONDS = 8.0  # for the last batch
DEPLOYED = 2**31  # a part of seeds that no training has


class PolicyServer:
    """Owned by the main thread."""

    def __init__(
        self,
        config: LearnerConfig,
        checkpoint: Checkpoint,
        *,
        greedy: bool,
        seed: int,
        say: Callable[[str], None],
        on_evaluated: Callable[[FinishedEpisodes], None] = lambda episodes: None,
        opponent: str = "",
    ) -> None:
        """`opponent` is a run or checkpoint directory, or `random`, that has all seats but one of each game."""
        check(config)
        self._config = config
        self._began = time.monotonic()
        self._is_ready = False
        self.device = choose_device(config.device)
        self.stop = Stop(on_stop=self._turn_away)
        self.metrics = ServingMetrics()
        exploration = GREEDY if greedy else final_exploration(config.exploration)
        self.inference = InferenceService(
            config,
            self.metrics,
            plan=opponent_plan(config, Seat(is_trained=False, exploration=exploration), opponent),
            job_seed=partial(session_seed, seed, DEPLOYED),
            on_failure=self._failed,
            say=say,
            describe=self.status,
        )
        self.address = ""
        self._spec = spec_of(checkpoint)
        self.inference.sessions.agree(self._spec)
        with learning_stream(self.device):
            self._build(checkpoint, seed, on_evaluated, opponent)

    def _build(
        self, checkpoint: Checkpoint, seed: int, on_evaluated: Callable[[FinishedEpisodes], None], opponent: str
    ) -> None:
        config, device, spec = self._config, self.device, self._spec
        torch.set_num_threads(torch_threads(config))
        actions = Actions(spec, config.model.squash)
        self._model = build_run_model(config, spec, device)
        load_weights(self._model, checkpoint)
        core_size = core_size_of(self._model)
        sizes = StoreSizes.of(config, core_size)._replace(capacity=0)
        check_budget(serving_budget(spec, self._model, sizes), device)
        self.policy = Policy(self._model, version=_version(checkpoint))
        self.inference.build(
            self.policy,
            actions,
            Store(spec, Fifo(), sizes, device),
            core_size=core_size,
            generator=torch.Generator(device).manual_seed(seed),
            device=device,
            on_evaluated=on_evaluated,
            league=self._league(opponent, seed) if opponent else None,
        )

    def _league(self, opponent: str, seed: int) -> League:
        """Return a league in which one policy plays against another; a random one needs no weights of its own."""
        bank = Bank(self._model, snapshots=1, every=0)
        if opponent != RANDOM:
            stack = self._config.env.frame_stack
            add_opponent(bank, "opponent", opponent, self._spec, self._model, stack, warn=lambda words: None)
        settings = LeagueConfig(match=Match.fixed, opponents=[opponent])
        return League(settings, bank, self.inference.sessions.seats, self.metrics, seed)

    def start(self) -> str:
        """Start serving; return the address."""
        self.address = self.inference.server.start()
        self.inference.begin(on_ready=self._become_ready)
        return self.address

    def reload(self, checkpoint: Checkpoint) -> None:
        """Serve other weights from the next batch on."""
        if spec_of(checkpoint) != self._spec:
            raise RunDirectoryError(f"the checkpoint has other spaces: {spec_of(checkpoint)} instead of {self._spec}")
        with learning_stream(self.device):
            load_weights(self._model, checkpoint)
            self.policy.publish(self._model, _version(checkpoint))

    def close(self, command: Command, reason: str) -> None:
        """Dismiss the actors, and raise what has failed meanwhile."""
        self.stop.ask("done", reason)
        if self.inference.has_begun:
            self.inference.pause()
            if not self.inference.wait(STOP_SECONDS):
                self.stop.fail(ThreadDied(f"thread server did not stop within {STOP_SECONDS:.0f} s"))
        if self.address:
            self.inference.server.stop(command, reason)
        if self.stop.failure is not None:
            raise self.stop.failure

    # For any thread.

    @property
    def is_ready(self) -> bool:
        return self._is_ready and not self.stop.is_set()

    def status(self) -> Status:
        now = time.monotonic()
        sessions = list(self.inference.sessions.open.values())
        return Status(
            state="running" if self.is_ready else "draining" if self.stop.is_set() else "waiting",
            version=__version__,
            env=self._config.env.id,
            device=str(self.device),
            run_dir=self._config.run_dir,
            address=self.address,
            metrics_address="",
            goal_env_steps=0,
            verdict=Verdict("none", "a policy is served and not trained", "nothing"),
            actors=[actor_status(session, self.policy.version, now) for session in sessions],
        )

    def _become_ready(self) -> None:
        self._is_ready = True
        self.inference.server.set_ready(not self.stop.is_set())

    def _turn_away(self) -> None:
        self.inference.server.set_ready(False)

    def _failed(self, error: BaseException) -> None:
        """A thread that dies takes the process with it."""
        name = threading.current_thread().name
        self.stop.fail(failed(ThreadDied, f"thread {name} died", error))


def opponent_plan(config: LearnerConfig, seat: Seat, opponent: str) -> list[Seat]:
    """Return the seats of an actor: one of each game is the policy's, another one in each simulation."""
    other = OPPONENTS._replace(exploration=AT_RANDOM if opponent == RANDOM else ON_POLICY)
    return [seat if not opponent or env in learner_envs(config) else other for env in range(config.actors.envs)]


def settings_of(run: str, envs: int = 0) -> LearnerConfig:
    """Return settings that serve the policy of a run: its environment, model and exploration.

    Nothing else of its training is kept. `envs` replaces the number of environments per actor.
    """
    trained = RunDirectory(Path(run)).config()
    envs = envs or trained.actors.envs
    return LearnerConfig(
        env=trained.env,
        model=trained.model,
        exploration=trained.exploration,
        actors=ActorsConfig(
            count=1, envs=envs, groups=1 if envs % (2 * trained.env.players) else 2, threads=trained.actors.threads
        ),
        serving=ServingConfig(
            max_slots=envs,
            max_rows=trained.serving.max_rows,
            graphs=trained.serving.graphs,
            shared_memory=trained.serving.shared_memory,
        ),
        run_dir=run,
        metrics="",
    )


def _version(checkpoint: Checkpoint) -> int:
    return int(checkpoint.state["learning"]["updates"])
