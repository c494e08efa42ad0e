"""Builds the bank of a process with policies of other runs, and saves it with the league. Knows no streams."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from seedrl.bank import Bank, Freezing
from seedrl.config import LearnerConfig
from seedrl.errors import ConfigError, RunDirectoryError
from seedrl.metrics import ServingMetrics
from seedrl.models.base import core_size_of
from seedrl.models.build import build_run_model
from seedrl.policy import Policy
from seedrl.run.checkpoint import MANIFEST, Tensors
from seedrl.run.directory import RunDirectory
from seedrl.run.snapshot import initial_weights, load_weights, spec_of
from seedrl.serving.league import League
from seedrl.serving.seats import Seats
from seedrl.sizes import has_league
from seedrl.specs import EnvSpec

Say = Callable[[str], None]


def build_bank(config: LearnerConfig, spec: EnvSpec, model: nn.Module, warn: Say) -> Bank:
    """Return a bank for snapshots of a model, with the policies that `league.opponents` names."""
    bank = Bank(model, config.league.snapshots, config.league.snapshot_updates)
    for source in config.league.opponents:
        add_opponent(bank, "league.opponents", source, spec, model, config.env.frame_stack, warn)
    return bank


class LeagueParts(NamedTuple):
    """The parts of a process that games against opponents need."""

    publisher: Freezing
    league: League
    saved: "SavedLeague"


def build_league(
    config: LearnerConfig,
    spec: EnvSpec,
    model: nn.Module,
    policy: Policy,
    seats: Seats,
    metrics: ServingMetrics,
    *,
    seed: int,
    warn: Say,
) -> LeagueParts | None:
    """Return the parts that the settings ask for; None if no seat is an opponent's."""
    if not has_league(config):
        return None
    bank = build_bank(config, spec, model, warn)
    league = League(config.league, bank, seats, metrics, seed)
    return LeagueParts(Freezing(policy, bank), league, SavedLeague(bank, league))


def add_opponent(
    bank: Bank,
    setting: str,
    source: str,
    spec: EnvSpec,
    model: nn.Module,
    frame_stack: int,
    warn: Say,
) -> None:
    """Add the policy of a run or checkpoint directory; raise ConfigError if it cannot act beside `model`."""
    other, _, updates = load_policy(setting, source, spec, frame_stack, next(model.parameters()).device, warn)
    if core_size_of(other) != core_size_of(model):
        raise ConfigError(
            f"{setting}: {source} has a recurrent state of {core_size_of(other)} numbers; expected "
            f"{core_size_of(model)}, as this policy has"
        )
    bank.add(source, updates, other)


def load_teacher(config: LearnerConfig, spec: EnvSpec, model: nn.Module, warn: Say) -> nn.Module:
    """Return the policy that `teacher` names; raise ConfigError if it cannot guide `model`."""
    stack, device = config.env.frame_stack, next(model.parameters()).device
    teacher, settings, _ = load_policy("teacher", config.teacher, spec, stack, device, warn)
    if core_size_of(teacher) and not core_size_of(model):
        raise ConfigError(f"teacher={config.teacher} has a memory; this policy needs one too (model.lstm, model.gru)")
    if settings.model.squash != config.model.squash:
        raise ConfigError(f"teacher={config.teacher} has model.squash={settings.model.squash}, unlike this policy")
    return teacher


def load_policy(
    setting: str, source: str, spec: EnvSpec, frame_stack: int, device: torch.device, warn: Say
) -> tuple[nn.Module, LearnerConfig, int]:
    """Return the policy of a run or checkpoint directory, its settings, and its updates; raise ConfigError."""
    checkpoint = initial_weights(source, warn, setting)
    settings = RunDirectory(_run_of(Path(source))).config()
    if spec_of(checkpoint) != spec or settings.env.frame_stack != frame_stack:
        raise ConfigError(
            f"{setting}: {source} was trained on {spec_of(checkpoint)} with env.frame_stack="
            f"{settings.env.frame_stack}; expected {spec} and {frame_stack}"
        )
    model = build_run_model(settings, spec, device)
    try:
        load_weights(model, checkpoint)
    except RunDirectoryError as error:
        raise ConfigError(f"{setting}: {source}: {error}") from error
    return model, settings, int(checkpoint.state["learning"]["updates"])


class SavedLeague:
    """The bank and the league as a checkpoint holds them."""

    def __init__(self, bank: Bank, league: League) -> None:
        self._bank = bank
        self._league = league

    def tensors(self) -> Tensors:
        return self._bank.tensors()

    def state(self) -> dict[str, Any]:
        return {"entries": self._bank.state(), **self._league.state()}

    def load(self, state: dict[str, Any], tensors: Tensors) -> None:
        self._bank.load(state["entries"], tensors)
        self._league.load(state)


def _run_of(source: Path) -> Path:
    """Return the run directory of a checkpoint, or the run directory itself."""
    return source.resolve().parents[1] if (source / MANIFEST).exists() else source
