"""`seedrl bench`: runs stages, shows what they find, and writes it down."""

import importlib
from pathlib import Path

from bench.harness import Report, fingerprint, write
from seedrl.config import BenchConfig
from seedrl.errors import ConfigError

STAGES = ("pool", "batcher", "inference", "learner", "service", "peers")


def run_bench(config: BenchConfig) -> list[Report]:
    """One stage, or `all` of them in the order of an observation's way."""
    if config.stage != "all" and config.stage not in STAGES:
        raise ConfigError(f"stage={config.stage} is not one of all, {', '.join(STAGES)}")
    names = STAGES if config.stage == "all" else (config.stage,)
    machine = fingerprint()
    print(f"{machine['cpu']}, {machine['cores']} cores, load {machine['load']:.1f}, commit {machine['commit']}")
    reports = []
    for name in names:
        print(f"\n{name}: {importlib.import_module(f'bench.{name}').__doc__.splitlines()[0]}", flush=True)
        reports.append(importlib.import_module(f"bench.{name}").run(config))
    if config.out:
        write(Path(config.out), reports)
        print(f"\nwritten to {config.out}")
    return reports
