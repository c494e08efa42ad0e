"""Refuses settings of opponents and teachers that cannot work. Knows no machine."""

from seedrl.algorithms.settings import ACTOR_CRITICS
from seedrl.config import LearnerConfig, Match
from seedrl.errors import require
from seedrl.plugins import is_import_path
from seedrl.sizes import has_league


def check_league(config: LearnerConfig) -> None:
    """Refuse settings of `league` that contradict each other or the number of players."""
    league = config.league
    require(
        league.match is Match.self or config.env.players > 1,
        f"league.match={league.match.value} needs several players, and env.players={config.env.players}",
    )
    require(
        not league.opponents or has_league(config),
        "league.opponents have no games: set league.match, or actors.evaluation to measure the policy against them",
    )
    require(
        league.match is not Match.fixed or bool(league.opponents),
        "league.match=fixed needs league.opponents, a list of run directories",
    )
    require(
        league.match in (Match.self, Match.fixed) or league.snapshot_updates > 0,
        f"league.match={league.match.value} needs league.snapshot_updates, the updates between snapshots",
    )
    require(league.snapshots >= 1, f"league.snapshots={league.snapshots} must be at least 1")
    require(league.snapshot_updates >= 0, f"league.snapshot_updates={league.snapshot_updates} must not be negative")
    require(0 <= league.current < 1, f"league.current={league.current} must be at least 0 and below 1")


def check_teacher(config: LearnerConfig) -> None:
    """Refuse a teacher where there is no policy to guide, and costs that have no meaning."""
    algorithm = config.algorithm
    for name in ("teacher_cost", "teacher_cost_end"):
        require(getattr(algorithm, name) >= 0, f"algorithm.{name}={getattr(algorithm, name)} must not be negative")
    require(
        0 < algorithm.teacher_decay <= 1,
        f"algorithm.teacher_decay={algorithm.teacher_decay} must be more than 0 and at most 1",
    )
    if not config.teacher:
        return
    require(
        algorithm.name in ACTOR_CRITICS or is_import_path(algorithm.name),
        f"teacher={config.teacher} guides a policy; algorithm.name={algorithm.name} is none of "
        f"{', '.join(ACTOR_CRITICS)} or your.module:Class",
    )
    require(not config.ranks.separate, f"teacher={config.teacher} does not work with ranks.separate=true")
