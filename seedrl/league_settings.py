"""Refuses settings of games against opponents that cannot work. Knows no machine."""

from seedrl.config import LearnerConfig, Match
from seedrl.errors import require
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
