"""The place of this process in a job, from the variables that torchrun and other launchers set. Knows no torch."""

import os
import socket
from collections.abc import Mapping
from typing import NamedTuple


class Identity(NamedTuple):
    """One learner alone is rank 0 of 1."""

    role: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the ranks of its machine
    node: str = ""
    local_world_size: int = 1  # ranks of its machine

    @property
    def is_first(self) -> bool:
        """Return whether this process writes what a run has once, such as checkpoints."""
        return self.rank == 0

    def __str__(self) -> str:
        return self.role if self.world_size == 1 else f"{self.role} rank {self.rank}/{self.world_size} on {self.node}"


ALONE = Identity("learner")


def identity(role: str, environment: Mapping[str, str] = os.environ) -> Identity:
    """Return the identity of this process. Our manifests set NODE_NAME; elsewhere the host's name is the node's."""
    return Identity(
        role,
        rank=int(environment.get("RANK", 0)),
        world_size=int(environment.get("WORLD_SIZE", 1)),
        local_rank=int(environment.get("LOCAL_RANK", 0)),
        node=environment.get("NODE_NAME", "") or socket.gethostname(),
        local_world_size=int(environment.get("LOCAL_WORLD_SIZE", 1)),
    )
