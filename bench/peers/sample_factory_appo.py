# /// script
# dependencies = ["torch==2.13.0", "sample-factory==2.1.1", "envpool==1.2.5"]
# ///
"""Sample Factory's APPO, asynchronous, with environments in envpool, as its own envpool examples have them.

Fair because: for Pong rollout, batches, epochs and network of sf_examples.envpool.atari. One process samples instead
of four, since envpool uses every core by itself, and 16 environments instead of 64: on two cores a rollout of 64 takes
longer than a turn. For CartPole no example uses envpool: the network is as ours, the reward scale that of its gym
example, and 64 environments and batches of 2,048 as its envpool examples have. No other numbers were tried.
"""

import argparse
import tempfile

import envpool
import gymnasium
import numpy
from meter import Meter, arguments
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner

SHARED = {
    "algo": "APPO",
    "device": "cpu",
    "batched_sampling": True,
    "num_workers": 1,
    "num_envs_per_worker": 1,
    "worker_num_splits": 1,
    "use_rnn": False,
    "summaries_use_frameskip": False,  # count steps, not simulator frames
    "train_for_env_steps": 10**9,
    "save_every_sec": 10**6,
    "save_best_every_sec": 10**6,
    "set_workers_cpu_affinity": False,
}
PONG = {
    "encoder_conv_architecture": "convnet_atari",  # the Nature CNN
    "obs_scale": 255.0,
    "nonlinearity": "relu",
    "rollout": 128,
    "batch_size": 256,
    "num_batches_per_epoch": 4,
    "num_epochs": 4,
    "normalize_input": False,
    "normalize_returns": False,
    "max_grad_norm": 0.5,
    "learning_rate": 2.5e-4,
}
CARTPOLE = {
    "encoder_mlp_layers": [64, 64],
    "reward_scale": 0.1,
    "batch_size": 2048,
    "rollout": 32,
}
POOLS = {
    "pong": ("Pong-v5", 16, {"reward_clip": True, "episodic_life": True}),
    "cartpole": ("CartPole-v1", 64, {}),
}


class Pool(gymnasium.Env):
    """envpool as Sample Factory wants a vector of environments: one with many agents."""

    def __init__(self, env_id: str, num_envs: int, options: dict) -> None:
        self._envs = envpool.make(env_id, env_type="gymnasium", num_envs=num_envs, seed=1, **options)
        self.observation_space, self.action_space = self._envs.observation_space, self._envs.action_space
        self.num_agents = num_envs

    def reset(self, **_):
        return self._envs.reset()

    def step(self, action):
        return self._envs.step(numpy.asarray(action, numpy.int32))


class Telling(AlgoObserver):
    """Tells the meter what the learner has trained on; training begins with the first update."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._meter: Meter | None = None

    def on_training_step(self, runner, _) -> None:
        self._meter = self._meter or Meter(self._asked, warm_up=3.0)
        if self._meter.update(sum(runner.env_steps.values())):
            self._meter.finish()


def make_env(name: str, *_, **__) -> Pool:
    return Pool(*POOLS[name])


def main() -> None:
    asked = arguments()
    register_env(asked.env, make_env)
    parser, _ = parse_sf_args([f"--env={asked.env}"])
    parser.set_defaults(**SHARED, **{"pong": PONG, "cartpole": CARTPOLE}[asked.env])
    cfg = parse_full_cfg(
        parser,
        [f"--env={asked.env}", f"--seed={asked.seed}", f"--train_dir={tempfile.mkdtemp()}", "--experiment=bench"],
    )
    _, runner = make_runner(cfg)
    runner.register_observer(Telling(asked))
    runner.init()
    runner.run()


if __name__ == "__main__":
    main()
