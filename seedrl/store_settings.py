"""Refuses settings of the store, and of recordings, that cannot work. Knows no machine."""

import math

from seedrl.config import SELECTORS, LearnerConfig
from seedrl.errors import require
from seedrl.plugins import check_name
from seedrl.sizes import is_replay, serving_ranks, store_capacity, store_tolerance


def check_store(config: LearnerConfig) -> None:
    """Refuse settings of `store` that contradict each other, or that the selector would ignore."""
    store, batch_size = config.store, config.algorithm.batch_size
    check_name("store.select", store.select, SELECTORS)
    require(
        store.capacity == 0 or store.capacity >= batch_size,
        f"store.capacity={store.capacity} could never hold algorithm.batch_size={batch_size} unrolls",
    )
    for name in ("min_size", "samples_per_insert", "tolerance", "max_uses", "max_staleness"):
        value = getattr(store, name)
        require(0 <= value < math.inf, f"store.{name}={value} must be finite and not negative")
    if is_replay(config):
        _check_replay(config)
    else:
        _refuse(config, "min_size", "samples_per_insert", "tolerance", "max_uses", "max_staleness")
    require(
        not store.checkpoint or store.select != "fifo",
        "store.checkpoint=true has no meaning with store.select=fifo, whose unrolls are trained on once",
    )
    require(
        not store.checkpoint or serving_ranks(config) == 1,
        f"store.checkpoint=true needs one store, not those of ranks.count={config.ranks.count}",
    )


def check_source(config: LearnerConfig) -> None:
    """Refuse settings of recordings that cannot work."""
    require(config.store.dump_gb > 0, f"store.dump_gb={config.store.dump_gb} must be positive")
    if not config.source:
        return
    require(not config.store.dump, f"source={config.source} brings nothing new to record: remove store.dump")
    for setting, value in (("ranks.count", config.ranks.count), ("actors.at_most", config.actors.at_most)):
        require(value <= 1, f"source={config.source} trains in one process and without actors, not {setting}={value}")


def _refuse(config: LearnerConfig, *settings: str) -> None:
    """Refuse settings that the selector would ignore."""
    given = [f"store.{name}={getattr(config.store, name)}" for name in settings if getattr(config.store, name)]
    needed = "uniform or priority" if is_replay(config) else "uniform, priority or mixed"
    require(
        not given,
        f"{', '.join(given)} has no meaning with store.select={config.store.select}; choose {needed}, or leave it out",
    )


def _check_replay(config: LearnerConfig) -> None:
    store, batch_size, capacity = config.store, config.algorithm.batch_size, store_capacity(config)
    require(
        capacity > batch_size,
        f"store.capacity={capacity} has to be more than algorithm.batch_size={batch_size} with "
        f"store.select={store.select}",
    )
    if store.select == "mixed":
        _refuse(config, "min_size", "samples_per_insert", "tolerance")
        require(0 <= store.replay_share < 1, f"store.replay_share={store.replay_share} must be at least 0 and below 1")
        require(
            round(store.replay_share * batch_size) < batch_size,
            f"store.replay_share={store.replay_share} leaves no new unroll in algorithm.batch_size={batch_size}",
        )
        return
    require(
        store.min_size <= capacity, f"store.min_size={store.min_size} is more than store.capacity={capacity} can hold"
    )
    require(
        not store.max_uses or store.samples_per_insert <= store.max_uses,
        f"store.samples_per_insert={store.samples_per_insert:g} is more than store.max_uses={store.max_uses} allows",
    )
    least = (batch_size + store.samples_per_insert) / 2
    require(
        store_tolerance(config) >= least,
        f"store.tolerance={store.tolerance:g} would let acting and training wait for each other; it has to be at least "
        f"{least:g}, half of algorithm.batch_size + store.samples_per_insert",
    )
    require(
        not config.lockstep or store.samples_per_insert > 0,
        f"lockstep=true with store.select={store.select} needs store.samples_per_insert, or training would never end",
    )
    _check_priority(config)


def _check_priority(config: LearnerConfig) -> None:
    priority = config.store.priority
    for name in ("alpha", "beta", "beta_end"):
        value = getattr(priority, name)
        require(0 <= value <= 1, f"store.priority.{name}={value} must be between 0 and 1")
