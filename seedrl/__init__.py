"""seedrl: central inference for reinforcement learning. Importing this package imports neither torch nor grpc.

policy = seedrl.load("runs/CartPole-v1/20260101-120000")
action = policy.act(observation)
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from seedrl.version import __version__

if TYPE_CHECKING:
    from seedrl.trained.policy import TrainedPolicy

__all__ = ["__version__", "load"]


def load(
    run: "str | Path" = "",
    checkpoint: str = "newest",
    *,
    greedy: bool = True,
    device: str = "cpu",
    seed: int = 1,
    env: Any = None,
) -> "TrainedPolicy":
    """Return the trained policy of a run directory, by default of the newest run.

    `checkpoint` is newest, best, or the name or directory of one. The policy takes the most likely action; with
    greedy=False it draws actions as at the end of training, with random numbers of this seed. `device` is cpu, cuda,
    cuda:NUMBER or auto. `env`, an environment or a vector of them, is needed only if its categories do not count from 0
    or its actions are nested: then its own spaces decide about the form of observations and actions.
    """
    from seedrl.trained.policy import load_policy

    return load_policy(run, checkpoint, greedy, device, seed, env)
