# /// script
# dependencies = ["torch==2.13.0", "envpool==1.2.5", "numpy==2.4.6"]
# ///
"""PPO in one loop on envpool, after CleanRL's ppo_atari_envpool: what people write who want it simple and fast.

Fair because: CleanRL's own settings but for 32 environments instead of 8, so that envpool has enough to step; envpool
and torch use every core by their defaults, and each has them to itself because the two phases take turns.
"""

import envpool
import numpy as np
import torch
from meter import Meter, arguments
from torch import Tensor, nn
from torch.distributions import Categorical

ENVS, STEPS, MINIBATCHES, EPOCHS = 32, 128, 4, 4
DISCOUNT, LAMBDA, CLIP, ENTROPY, VALUE, MAX_NORM, RATE = 0.99, 0.95, 0.1, 0.01, 0.5, 0.5, 2.5e-4


class Network(nn.Module):
    """The Nature CNN with two heads."""

    def __init__(self, actions: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(layer(nn.Conv2d(4, 32, 8, stride=4)), nn.ReLU()),
            *(layer(nn.Conv2d(32, 64, 4, stride=2)), nn.ReLU()),
            *(layer(nn.Conv2d(64, 64, 3, stride=1)), nn.ReLU()),
            *(nn.Flatten(), layer(nn.Linear(64 * 7 * 7, 512)), nn.ReLU()),
        )
        self.policy = layer(nn.Linear(512, actions), 0.01)
        self.value = layer(nn.Linear(512, 1), 1.0)

    def forward(self, frames: Tensor) -> tuple[Categorical, Tensor]:
        hidden = self.body(frames / 255.0)
        return Categorical(logits=self.policy(hidden)), self.value(hidden).squeeze(-1)


def layer(module: nn.Conv2d | nn.Linear, gain: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


class Rollout:
    """The steps of 32 environments, 128 each, and their current state."""

    def __init__(self, envs) -> None:
        self.envs = envs
        self.frames = torch.zeros(STEPS, ENVS, 4, 84, 84, dtype=torch.uint8)
        self.action, self.logp, self.reward, self.done, self.value = torch.zeros(5, STEPS, ENVS)
        self.next_frames, self.next_done = torch.from_numpy(envs.reset()[0]), torch.zeros(ENVS)

    @torch.no_grad()
    def collect(self, network: Network) -> None:
        for step in range(STEPS):
            self.frames[step], self.done[step] = self.next_frames, self.next_done
            policy, self.value[step] = network(self.next_frames)
            action = policy.sample()
            self.action[step], self.logp[step] = action, policy.log_prob(action)
            frames, reward, terminated, truncated, _ = self.envs.step(action.numpy().astype(np.int32))
            self.reward[step] = torch.from_numpy(reward)
            self.next_frames, self.next_done = (
                torch.from_numpy(frames),
                torch.from_numpy(terminated | truncated).float(),
            )

    @torch.no_grad()
    def advantages(self, network: Network) -> Tensor:
        """Generalised advantage estimation, backwards through time."""
        result, last = torch.zeros(STEPS, ENVS), torch.zeros(ENVS)
        value, done = network(self.next_frames)[1], self.next_done
        for step in reversed(range(STEPS)):
            error = self.reward[step] + DISCOUNT * value * (1 - done) - self.value[step]
            last = error + DISCOUNT * LAMBDA * (1 - done) * last
            result[step], value, done = last, self.value[step], self.done[step]
        return result


def update(network: Network, optimizer: torch.optim.Optimizer, rollout: Rollout) -> None:
    """Four passes over the rollout in four shuffled parts."""
    advantages = rollout.advantages(network)
    returns = (advantages + rollout.value).flatten()
    frames, action, advantages = rollout.frames.flatten(0, 1), rollout.action.flatten(), advantages.flatten()
    old_logp, old_value = rollout.logp.flatten(), rollout.value.flatten()
    for _ in range(EPOCHS):
        for part in torch.randperm(STEPS * ENVS).chunk(MINIBATCHES):
            policy, value = network(frames[part])
            advantage = advantages[part]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            ratio = (policy.log_prob(action[part]) - old_logp[part]).exp()
            policy_loss = -torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
            clipped = old_value[part] + (value - old_value[part]).clamp(-CLIP, CLIP)
            value_loss = 0.5 * torch.max((value - returns[part]) ** 2, (clipped - returns[part]) ** 2).mean()
            loss = policy_loss + VALUE * value_loss - ENTROPY * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), MAX_NORM)
            optimizer.step()


def main() -> None:
    asked = arguments()
    assert asked.env == "pong", "this adapter plays Pong only"
    torch.manual_seed(asked.seed)
    envs = envpool.make(
        "Pong-v5", env_type="gymnasium", num_envs=ENVS, episodic_life=True, reward_clip=True, seed=asked.seed
    )
    network, rollout = Network(envs.action_space.n), Rollout(envs)
    optimizer = torch.optim.Adam(network.parameters(), lr=RATE, eps=1e-5)
    meter, steps = Meter(asked, warm_up=1.0), 0
    while not meter.update(steps):
        rollout.collect(network)
        update(network, optimizer, rollout)
        steps += STEPS * ENVS
    meter.finish()


if __name__ == "__main__":
    main()
