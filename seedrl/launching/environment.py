"""The environment variables of a process of a job: its role's win over the job's, and those over this process's."""

import os
from collections.abc import Mapping

from seedrl.config import LaunchConfig, RoleConfig


def variables(launch: LaunchConfig, role: RoleConfig, ours: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {**ours, **launch.env, **role.env}
