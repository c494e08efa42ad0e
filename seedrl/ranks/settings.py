"""The settings of one rank: where it serves, writes and speaks, so that several of them are in nobody's way.

A *shard* is a rank, its endpoint and the actors there. Knows nothing of how ranks talk to each other.
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
from seedrl.wire.address import address_of


def shard_of(config: LearnerConfig, identity: Identity) -> LearnerConfig:
    """What this rank makes of the settings of all. Raises ConfigError if there are not as many ranks as those say."""
    require(
        config.ranks.count == identity.world_size,
        f"ranks.count={config.ranks.count}, and {identity.world_size} were started; launch=torchrun starts them, and "
        f"so does torchrun --nproc-per-node={config.ranks.count} -m seedrl learner ranks.count={config.ranks.count} …",
    )
    cores = available_cores() // identity.local_world_size
    shard = replace(config, threads=config.threads or max(1, cores // 2))
    return shard if identity.is_first else _further(shard, identity.local_rank)


def _further(config: LearnerConfig, local_rank: int) -> LearnerConfig:
    """Rank 0 writes and shows what a run has once. Ranks of one machine have ports in a row."""
    return replace(
        config,
        listen=address_of(config.listen, local_rank),
        socket=config.socket and address_of(config.socket, local_rank),
        metrics=config.metrics if config.metrics in ("", "auto") else address_of(config.metrics, local_rank),
        display=config.display if config.display is Display.none else Display.plain,
        report=ReportConfig(),
    )


def directory_of(config: LearnerConfig, rank: int, share: Callable[[Any], Any]) -> tuple[RunDirectory, LearnerConfig]:
    """Prepare and claim the directory of this rank. Rank 0 has that of the run; the others write below it.

    Rank 0 sends them its path and the number of processes before this one. On another machine the path may be on
    another file system, so only rank 0's count is sure to survive.
    """
    run = RunDirectory.prepare(config) if rank == 0 else None
    if run is not None:
        run.claim(config)
    path, earlier_processes = share(None if run is None else [str(run.path), run.earlier_processes])
    if run is None:
        config = replace(config, run_dir=str(Path(path) / "ranks" / str(rank)))
        run = RunDirectory.prepare(config)
        run.claim(config)
        run.earlier_processes = earlier_processes
    return run, config


def generator_seed(seed: int, rank: int, earlier_processes: int) -> int:
    """Return the seed of the generator that draws a rank's actions; rank 0's state is part of a checkpoint."""
    return seed if not rank else int(np.random.SeedSequence([seed, earlier_processes, rank]).generate_state(1)[0])
