"""Wrappers that come with seedrl, for env.wrappers. Knows nothing of streams; actors may always import this module."""

import numpy as np

from envs_server.pool import Pool, Wrapper
from seedrl.errors import ConfigError
from seedrl.specs import Arrays, ArraySpec, EnvSpec


class CartPolePositions(Wrapper):
    """CartPole without its velocities: the position of the cart and the angle of the pole."""

    ENTRIES = (0, 2)  # of position, velocity, angle and angular velocity

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        observation = pool.spec.observation
        if isinstance(observation, dict) or observation.shape != (4,):
            raise ConfigError(f"CartPolePositions needs the four numbers of CartPole, saw {observation}")
        self.spec = EnvSpec(ArraySpec((len(self.ENTRIES),), observation.dtype), pool.spec.action)

    def observation(self, observation: Arrays) -> Arrays:
        assert not isinstance(observation, dict)
        return np.ascontiguousarray(observation[:, self.ENTRIES])
