"""Environment variables of a job's processes: a role's win over the job's, and the job's over those of this process."""

import os
from collections.abc import Mapping

from seedrl.config import LaunchConfig, RoleConfig


def variables(launch: LaunchConfig, role: RoleConfig, ours: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a process of this role."""
    return {**ours, **launch.env, **role.env}
