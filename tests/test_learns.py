"""Every algorithm learns a small task in seconds, with a network of any kind, in one thread and so always alike."""

from dataclasses import replace

import pytest
import torch

from envs_server.pool import EnvPool
from seedrl.actions import Actions
from seedrl.algorithms.build import build_algorithm
from seedrl.algorithms.neutral import resolve
from seedrl.algorithms.settings import AlgorithmConfig, DQNConfig
from seedrl.config import ActorsConfig, ExplorationConfig, LearnerConfig, ModelConfig, StopConfig, StoreConfig
from seedrl.learning.learner import Learner
from seedrl.metrics import LearningMetrics
from seedrl.models.build import build_model
from seedrl.selection.build import build_selector
from seedrl.serving.seats import Schedule, planned_seats
from seedrl.sizes import store_capacity
from tests.fakes import make_job
from tests.rig import Rig

torch.set_num_threads(1)  # for tensors this small a second thread only waits

ENVS, LENGTH, STEPS = 64, 16, 15_000
EPSILON_GREEDY = ExplorationConfig(temperature=0.0, epsilon=1.0, epsilon_end=0.05)
ALGORITHMS = {
    "ppo": AlgorithmConfig(name="ppo", passes=4, minibatches=8, learning_rate=3e-3),
    "vtrace": AlgorithmConfig(name="vtrace", passes=2, minibatches=8, learning_rate=3e-3),
    "pqn": AlgorithmConfig(name="pqn", passes=4, minibatches=8, learning_rate=3e-3, max_grad_norm=10.0),
    "dqn": AlgorithmConfig(
        name="dqn", minibatches=8, learning_rate=3e-3, max_grad_norm=10.0, dqn=DQNConfig(target_period=50)
    ),
}
REPLAY = StoreConfig(select="priority", capacity=512, samples_per_insert=8.0)


class CatchRun:
    """A run on Catch in one thread: actions, recording, training and publishing in turn."""

    def __init__(self, config: LearnerConfig) -> None:
        self.pool = EnvPool(make_job(ENVS, env_id="Catch-v0", seed=config.seed), threads=1)
        spec = self.pool.spec
        self.config = resolve(config, spec)
        network = build_model(config.model, spec, config.seed)
        self.rig = Rig(
            spec,
            network,
            slots=ENVS,
            capacity=store_capacity(config),
            unroll_length=LENGTH,
            seed=config.seed,
            schedule=Schedule.of(config.exploration),
            selector=build_selector(self.config),
        )
        self.learner = Learner(
            self.config,
            network,
            build_algorithm(self.config.algorithm, Actions(spec), network),
            LearningMetrics(),
            env_steps=lambda: self.rig.metrics.env_steps,
            prefer=self.rig.store.prefer,
        )

    def run(self) -> float:
        """Return the mean return of the last hundred episodes."""
        session = self.rig.join(range(ENVS), planned_seats(self.config))
        while self.rig.metrics.env_steps < self.config.stop.env_steps:
            self.rig.fraction = self.rig.metrics.env_steps / self.config.stop.env_steps
            self.rig.play(session, self.pool, steps=1)
            while (unrolls := self.rig.store.take(self.config.algorithm.batch_size, timeout=0)) is not None:
                self.learner.train(unrolls)
                self.learner.publish(self.rig.policy)
        mean = self.rig.metrics.return_mean_100
        assert mean is not None
        return mean


@pytest.mark.parametrize("lstm", [0, 32])
@pytest.mark.parametrize("name", ["ppo", "vtrace", "pqn"])
def test_algorithm_catches_most_balls(name: str, lstm: int) -> None:
    """At random one ball in five is caught, a mean of -0.6."""
    is_pqn = name == "pqn"
    config = LearnerConfig(
        model=ModelConfig(layers=[64], layer_norm=is_pqn, popart=not is_pqn, lstm=lstm),
        algorithm=replace(ALGORITHMS[name], unroll_length=LENGTH, batch_size=ENVS),
        exploration=EPSILON_GREEDY if is_pqn else ExplorationConfig(),
        actors=ActorsConfig(envs=ENVS, groups=1),
        stop=StopConfig(env_steps=STEPS),
    )
    assert CatchRun(config).run() > 0


def test_algorithm_catches_most_balls_from_replay() -> None:
    config = LearnerConfig(
        model=ModelConfig(layers=[64], popart=False, normalize=False),
        algorithm=replace(ALGORITHMS["dqn"], unroll_length=LENGTH, batch_size=ENVS),
        exploration=EPSILON_GREEDY,
        actors=ActorsConfig(envs=ENVS, groups=1),
        store=REPLAY,
        stop=StopConfig(env_steps=STEPS),
    )
    assert CatchRun(config).run() > 0
