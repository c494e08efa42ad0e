# /// script
# dependencies = ["torch==2.13.0", "ray[rllib]==2.60.0", "envpool==1.2.5"]
# ///
"""RLlib's IMPALA on Pong: the same algorithm as ours, from the library most clusters have.

Fair because: IMPALA's own defaults for learning, batch and fragment length, and the Nature CNN. Ours are one env runner
a core with 5 environments each, and the learner in the driver, not a process more; no other numbers were tried.
Environments are envpool's, which saves it preprocessing in Python.
"""

import os
import tempfile

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import envpool
import gymnasium
import numpy as np
import ray
from meter import Meter, arguments
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

RUNNERS, ENVS = os.cpu_count() or 2, 5


class Pong(gymnasium.Env):
    """One environment of envpool, channels last and in [0, 1], as RLlib's CNN wants it."""

    def __init__(self, _config: dict | None = None) -> None:
        self._env = envpool.make(
            "Pong-v5", env_type="gymnasium", num_envs=1, num_threads=1, episodic_life=True, reward_clip=True
        )
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (84, 84, 4), np.float32)
        self.action_space = gymnasium.spaces.Discrete(6)

    def reset(self, *, seed=None, options=None):
        return self._frames(self._env.reset()[0]), {}

    def step(self, action):
        frames, reward, terminated, truncated, _ = self._env.step(np.array([action], np.int32))
        return self._frames(frames), float(reward[0]), bool(terminated[0]), bool(truncated[0]), {}

    def _frames(self, frames):
        return np.moveaxis(frames[0], 0, -1) * np.float32(1 / 255)


def config() -> IMPALAConfig:
    network = DefaultModelConfig(
        conv_filters=[(32, 8, 4), (64, 4, 2), (64, 3, 1)],
        conv_activation="relu",
        head_fcnet_hiddens=[512],
        head_fcnet_activation="relu",
        vf_share_layers=True,
    )
    return (
        IMPALAConfig()
        .environment(Pong)
        .env_runners(num_env_runners=RUNNERS, num_envs_per_env_runner=ENVS, rollout_fragment_length=50)
        .learners(num_learners=0)
        .training(train_batch_size_per_learner=500, lr=5e-4, entropy_coeff=0.01, grad_clip=40.0, vf_loss_coeff=0.5)
        .rl_module(model_config=network)
        .reporting(min_time_s_per_iteration=1)
    )


def main() -> None:
    asked = arguments()
    assert asked.env == "pong", "this adapter plays Pong only"
    directory = tempfile.mkdtemp()
    ray.init(num_cpus=RUNNERS + 1, include_dashboard=False, _temp_dir=directory, object_store_memory=10**9)
    algorithm = config().debugging(seed=asked.seed).build_algo()
    meter, steps = Meter(asked, warm_up=5.0), 0
    while not meter.update(steps):
        learners = algorithm.train().get("learners", {})  # none before the first update
        steps = learners.get("__all_modules__", {}).get("num_env_steps_trained_lifetime", steps)
    meter.finish()


if __name__ == "__main__":
    main()
