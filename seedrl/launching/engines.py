"""The engine of a job: refuses a job that it could not run, or lets it run the job.

An engine is imported only when a job needs it. Knows nothing of how settings are composed.
"""

import re
import shlex
from collections.abc import Sequence

from seedrl.config import Engine, RunConfig
from seedrl.errors import ConfigError
from seedrl.validation import check_job


def launch_job(config: RunConfig, overrides: Sequence[str]) -> None:
    """Let the job's engine run it; return when it is over."""
    check_launch(config, overrides)
    for_learner = [each for each in overrides if not re.match(r"[+~]*launch[.=]", each)]  # it has no such settings
    if config.launch.engine in (Engine.local, Engine.torchrun):
        from seedrl.launching.local import run_locally

        run_locally(config, for_learner)
    else:
        try:
            from seedrl.launching.ray_driver import run_on_ray
        except ModuleNotFoundError as error:
            raise ConfigError(f"launch=ray needs one more package: pip install 'seedrl[ray]' ({error})") from error
        run_on_ray(config, for_learner)


def check_launch(config: RunConfig, overrides: Sequence[str]) -> None:
    """Refuse a job that its engine could not run, before anything is started."""
    if config.launch.engine is Engine.kubernetes:
        rest = [each for each in overrides if each != "launch=kubernetes"]
        command = shlex.join(["seedrl", "render", "out=manifests", *rest])
        raise ConfigError(f"launch=kubernetes starts nothing by itself; write manifests for kubectl: {command}")
    check_job(config)
