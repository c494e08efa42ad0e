"""`seedrl bench`: runs stages, shows what they find, and writes it down."""

import importlib
import time
from collections.abc import Sequence
from pathlib import Path

from bench.harness import Report, fingerprint, write
from seedrl.config import BenchConfig
from seedrl.errors import ConfigError

STAGES = (
    "pool",
    "wire",
    "batcher",
    "inference",
    "learner",
    "replay",
    "service",
    "metrics",
    "end_to_end",
    "simulation",
    "weights_or_observations",
    "learning",
    "peers",
)


def run_bench(config: BenchConfig) -> list[Report]:
    """One stage, or `all` of them in the order of an observation's way."""
    if config.stage != "all" and config.stage not in STAGES:
        raise ConfigError(f"stage={config.stage} is not one of all, {', '.join(STAGES)}")
    names = STAGES if config.stage == "all" else (config.stage,)
    machine = fingerprint()
    print(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f}, commit {machine['commit']}")
    reports: list[Report] = []
    for name in names:
        began = time.monotonic()
        stage = importlib.import_module(f"bench.{name}")
        print(f"\n{name}: {str(stage.__doc__).splitlines()[0]}", flush=True)
        reports.append(stage.run(config))
        reports[-1].seconds = time.monotonic() - began
        if config.out:  # at once: an interruption loses one stage, and `simulation` takes the costs of those before
            write(Path(config.out), reports)
    if config.out:
        print(f"\nwritten to {config.out}")
    return reports


def with_files(verb: str, names: Sequence[str]) -> int:
    """`compare A.json B.json`, `guard HISTORY.jsonl NEW.json` or `render FILE.json [RESULTS.md]`: the exit code."""
    files = [Path(name) for name in names]
    if verb == "compare" and len(files) == 2:
        from bench.compare import compare

        return compare(*files)
    if verb == "guard" and len(files) == 2:
        from bench.history import guard

        return guard(*files)
    if verb == "render" and 1 <= len(files) <= 2:
        from bench.results import render

        render(files[0], files[1] if len(files) == 2 else files[0].with_name("RESULTS.md"))
        return 0
    raise ConfigError(f"{verb} cannot work with {len(files)} files; seedrl bench --help says what it takes")
