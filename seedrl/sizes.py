"""Derives sizes from the settings: rows per request, ranks that serve, threads, unrolls kept. Holds no defaults."""

import os

from seedrl.config import SELECTORS, LearnerConfig, Match


def group_size(config: LearnerConfig) -> int:
    """Return the environments per request. A lock-step run has one group, so that rows always arrive in one order."""
    return config.actors.envs if config.lockstep else config.actors.envs // config.actors.groups


def evaluation_envs(config: LearnerConfig) -> list[int]:
    """Return the environments of an actor that evaluate: evenly spaced, and at least one if there is a share.

    All players of a simulation evaluate, or none of them.
    """
    players, share = config.env.players, config.actors.evaluation
    simulations = config.actors.envs // players
    count = max(1, round(share * simulations)) if share else 0
    chosen = [number * simulations // count for number in range(count)]
    return [simulation * players + player for simulation in chosen for player in range(players)]


def has_league(config: LearnerConfig) -> bool:
    """Return whether some seats are those of opponents: entries of the bank, which are not trained on."""
    league = config.league
    is_measured = config.actors.evaluation > 0 and (league.snapshot_updates > 0 or bool(league.opponents))
    return config.env.players > 1 and (league.match is not Match.self or is_measured)


def learner_envs(config: LearnerConfig) -> set[int]:
    """Return the environments of an actor in which one player of each game is: another one in each simulation."""
    players = config.env.players
    return {env for env in range(config.actors.envs) if env % players == env // players % players}


def opponent_envs(config: LearnerConfig) -> list[int]:
    """Return the environments of an actor in which opponents act: in each game all players but one.

    With league.match=self only evaluation has opponents.
    """
    if not has_league(config):
        return []
    envs = evaluation_envs(config) if config.league.match is Match.self else range(config.actors.envs)
    return sorted(set(envs) - learner_envs(config))


def trained_envs(config: LearnerConfig) -> int:
    """Return how many environments of an actor are trained on."""
    return config.actors.envs - len({*evaluation_envs(config), *opponent_envs(config)})


def can_be_on_policy(config: LearnerConfig) -> bool:
    """Return whether train batches can hold the same number of unrolls of every environment, all of one policy."""
    actors = config.actors
    envs = actors.count * trained_envs(config)
    is_fixed = envs > 0 and actors.at_most <= actors.count and config.ranks.count == 1
    return is_fixed and not is_replay(config) and config.algorithm.batch_size % envs == 0


def is_replay(config: LearnerConfig) -> bool:
    """Return whether the settings name a built-in selector that trains on unrolls more than once."""
    return config.store.select in SELECTORS and config.store.select != "fifo"


def actor_count(config: LearnerConfig) -> int:
    """Return how many actors `seedrl run` starts at first: none if recorded unrolls are the source."""
    return 0 if config.source else config.actors.count


def store_capacity(config: LearnerConfig) -> int:
    """Return how many finished unrolls the store keeps."""
    return config.store.capacity or (64 if is_replay(config) else 2) * config.algorithm.batch_size


def store_tolerance(config: LearnerConfig) -> float:
    """Return how many samples acting or training may be ahead: by default all environments may end at once."""
    store, actors = config.store, config.actors
    envs = max(1, actors.count, actors.at_most) * actors.envs
    return store.tolerance or 2 * config.algorithm.batch_size + store.samples_per_insert * envs


def serving_ranks(config: LearnerConfig) -> int:
    """Return how many ranks actors stream to."""
    return 1 if config.ranks.separate else config.ranks.count


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def torch_threads(config: LearnerConfig) -> int:
    """Return the torch threads of inference; training has the same number."""
    return config.threads or max(1, available_cores() // 2)
