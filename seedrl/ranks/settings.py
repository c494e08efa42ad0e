"""The settings, the run directory and the seed of one rank of several, so that ranks do not get in each other's way.

Knows nothing of how ranks communicate.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from seedrl.config import Display, LearnerConfig, ReportConfig
from seedrl.errors import require
from seedrl.run.directory import RunDirectory
from seedrl.run.identity import Identity
from seedrl.sizes import available_cores
from seedrl.wire.address import address_of_rank


def settings_of_rank(config: LearnerConfig, identity: Identity) -> LearnerConfig:
    """Return the settings of this rank. Raises ConfigError if `ranks.count` is not the number of ranks started."""
    require(
        config.ranks.count == identity.world_size,
        f"ranks.count={config.ranks.count}, and {identity.world_size} were started; launch=torchrun starts them, and "
        f"so does torchrun --nproc-per-node={config.ranks.count} -m seedrl learner ranks.count={config.ranks.count} …",
    )
    cores = available_cores() // identity.local_world_size
    share = config.threads or max(1, cores // 2)
    settings = config if identity.local_world_size == 1 else replace(config, threads=share)
    return settings if identity.is_first else _further(settings, identity.local_rank)


def _further(config: LearnerConfig, local_rank: int) -> LearnerConfig:
    """Return the settings of a rank other than 0: it has its own ports, and neither terminal nor reports."""
    return replace(
        config,
        listen=address_of_rank(config.listen, local_rank),
        socket=config.socket and address_of_rank(config.socket, local_rank),
        metrics=config.metrics if config.metrics in ("", "auto") else address_of_rank(config.metrics, local_rank),
        display=config.display if config.display is Display.none else Display.plain,
        report=ReportConfig(),
    )


def directory_of(
    config: LearnerConfig, rank: int, broadcast_object: Callable[[Any], Any]
) -> tuple[RunDirectory, LearnerConfig]:
    """Prepare and claim the directory of this rank: that of the run for rank 0, one below it for each of the others.

    Rank 0 sends them its path and the number of processes before this one. On another machine the path may be on
    another file system, so only rank 0's count is sure to survive.
    """
    run = RunDirectory.prepare(config) if rank == 0 else None
    if run is not None:
        run.claim(config)
    path, earlier_processes = broadcast_object(None if run is None else [str(run.path), run.earlier_processes])
    if run is None:
        config = replace(config, run_dir=str(Path(path) / "ranks" / str(rank)))
        run = RunDirectory.prepare(config)
        run.claim(config)
        run.earlier_processes = earlier_processes
    return run, config


def generator_seed(seed: int, rank: int, earlier_processes: int) -> int:
    """Return the seed of the generator that draws a rank's actions; rank 0's state is part of a checkpoint."""
    return seed if not rank else int(np.random.SeedSequence([seed, earlier_processes, rank]).generate_state(1)[0])
