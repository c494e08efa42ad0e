# /// script
# dependencies = ["torch==2.13.0", "stable-baselines3==2.9.2", "gymnasium[box2d]==1.3.0", "numpy==2.4.6"]
# ///
"""Stable-Baselines3's PPO on CartPole and LunarLander: what most people start with.

Fair because: the tuned settings of rl-baselines3-zoo for each and its default network of 64-64, as ours. One torch
thread is our choice, for networks this small; two were not tried.
"""

import statistics
from dataclasses import dataclass

import torch
from meter import Meter, arguments
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env


@dataclass(frozen=True)
class Zoo:
    """The settings of rl-baselines3-zoo for an environment."""

    env_id: str
    envs: int
    learning_rate: float
    settings: dict[str, float]
    falls_until: int = 0  # steps over which the zoo lowers learning rate and clip range to 0; 0 for never
    most: int = 10_000_000

    def falling(self, start: float):
        """In proportion to what is left of the zoo's budget; it would end at 0, this goes on with a tenth."""
        if not self.falls_until:
            return start
        return lambda left: start * max(0.1, 1 - (1 - left) * self.most / self.falls_until)


ZOO = {
    "cartpole": Zoo(
        "CartPole-v1",
        envs=8,
        learning_rate=1e-3,
        settings={"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gae_lambda": 0.8, "gamma": 0.98},
        falls_until=100_000,
    ),
    "lunarlander": Zoo(
        "LunarLander-v3",
        envs=16,
        learning_rate=3e-4,
        settings={
            "n_steps": 1024,
            "batch_size": 64,
            "n_epochs": 4,
            "gae_lambda": 0.98,
            "gamma": 0.999,
            "ent_coef": 0.01,
        },
    ),
}


class Telling(BaseCallback):
    """Tells the meter the steps and the mean return of the last 100 episodes after every step."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def _on_step(self) -> bool:
        episodes = self.model.ep_info_buffer
        full = len(episodes) == 100
        mean_return = statistics.fmean(episode["r"] for episode in episodes) if full else None
        return not self._meter.update(self.num_timesteps, mean_return)


def main() -> None:
    asked = arguments()
    zoo = ZOO[asked.env]
    torch.set_num_threads(1)
    model = PPO(
        "MlpPolicy",
        make_vec_env(zoo.env_id, n_envs=zoo.envs, seed=asked.seed),
        learning_rate=zoo.falling(zoo.learning_rate),
        clip_range=zoo.falling(0.2),
        seed=asked.seed,
        device="cpu",
        **zoo.settings,
    )
    meter = Meter(asked, warm_up=1.0)
    model.learn(zoo.most, callback=Telling(meter))
    meter.finish()


if __name__ == "__main__":
    main()
