# /// script
# dependencies = ["torch==2.13.0", "stable-baselines3==2.9.2", "gymnasium==1.3.0", "numpy==2.4.6"]
# ///
"""Stable-Baselines3's PPO on CartPole: what most people start with.

Fair because: the tuned settings of rl-baselines3-zoo for CartPole-v1 and its default network of 64-64, as ours. One
torch thread is our choice, for networks this small; two were not tried.
"""

import statistics

import torch
from meter import Meter, arguments
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env

BUDGET = 100_000  # steps over which the zoo lowers learning rate and clip range to 0
MOST = 100 * BUDGET
SETTINGS = {"n_steps": 32, "batch_size": 256, "n_epochs": 20, "gae_lambda": 0.8, "gamma": 0.98, "ent_coef": 0.0}


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


def falling(start: float):
    """In proportion to what is left of the zoo's budget; it would end at 0, this goes on with a tenth."""
    return lambda left: start * max(0.1, 1 - (1 - left) * MOST / BUDGET)


def main() -> None:
    asked = arguments()
    assert asked.env == "cartpole", "this adapter plays CartPole only"
    torch.set_num_threads(1)
    envs = make_vec_env("CartPole-v1", n_envs=8, seed=asked.seed)
    model = PPO(
        "MlpPolicy",
        envs,
        learning_rate=falling(1e-3),
        clip_range=falling(0.2),
        seed=asked.seed,
        device="cpu",
        **SETTINGS,
    )
    meter = Meter(asked, warm_up=1.0)
    model.learn(MOST, callback=Telling(meter))
    meter.finish()


if __name__ == "__main__":
    main()
