"""Finds the members of a run that people name: one actor, the actors of a rank, or all. Knows nothing of what for.

Every rank of a learner has an endpoint, actors and a run context of its own. With an address there is one endpoint, and
nothing is known of actors that have left.
"""

import difflib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from seedrl.config import ControlConfig, StatusConfig
from seedrl.errors import ConfigError, LearnerLost
from seedrl.monitoring.connection import ANSWER_SECONDS, context_of, link_to
from seedrl.monitoring.units import duration
from seedrl.run.context import FILE, Context, Member
from seedrl.run.directory import RunDirectory
from seedrl.run.finding import find_run
from seedrl.wire.channel import Link, ask_status


class Endpoint(NamedTuple):
    """The endpoint of one rank, and what is known of its members."""

    rank: int
    link: Link
    context: Context

    def names(self) -> list[str]:
        """Ask for the names of the actors that are connected; none if no learner answers."""
        try:
            return sorted({actor.name for actor in ask_status(self.link, ANSWER_SECONDS).actors})
        except LearnerLost:
            return []


class Gone(NamedTuple):
    """An actor that was a member of the run, and is not connected."""

    rank: int
    name: str
    words: str  # when it was seen last, and how it ended


def endpoints_of(config: ControlConfig | StatusConfig) -> list[Endpoint]:
    """Return the endpoint of every rank, or of the one that is named. Raises ConfigError if there is no such rank."""
    first = link_to(config)
    if config.learner:
        if config.rank is not None:
            raise ConfigError(f"rank={config.rank} is looked up in a run directory; leave it out, or learner= instead")
        return [Endpoint(0, first, Context())]
    directories = _directories(find_run(config.run))
    if config.rank is not None and config.rank not in directories:
        raise ConfigError(
            f"rank={config.rank}: expected one with a run context here ({', '.join(map(str, directories))}); a rank on "
            "another machine is reached by learner=HOST:PORT"
        )
    contexts = {rank: context_of(path) for rank, path in directories.items() if config.rank in (None, rank)}
    return [Endpoint(rank, Link(each.address, config.security), each) for rank, each in contexts.items()]


def _directories(run: Path) -> dict[int, Path]:
    """Return the directory of each rank that has written its run context."""
    further = {rank: run / "ranks" / str(rank) for rank in range(1, RunDirectory(run).config().ranks.count)}
    return {0: run, **{rank: path for rank, path in further.items() if (path / FILE).exists()}}


def serving(name: str, endpoints: Sequence[Endpoint]) -> list[Endpoint] | Gone:
    """Return the endpoints that an actor is connected to, or what is known of it if it has left.

    Raises ConfigError for a name that no member has or had, with the nearest one.
    """
    names = {endpoint.rank: endpoint.names() for endpoint in endpoints}
    found = [endpoint for endpoint in endpoints if name in names[endpoint.rank]]
    if found:
        return found
    for endpoint in endpoints:
        if name in endpoint.context.members:
            return Gone(endpoint.rank, name, last_seen(endpoint.context.members[name]))
    raise _unknown(name, sorted({each for found_there in names.values() for each in found_there}))


def last_seen(member: Member) -> str:
    """Return when a member was seen last, and how its last process ended, in words."""
    seen = f"last seen {duration(time.time() - member.seen)} ago" if member.seen else "never seen"
    ended = "" if member.exit_code is None else f", exit code {member.exit_code}"
    return seen + ended + (f": {member.last_words}" if member.last_words else "")


def _unknown(name: str, connected: list[str]) -> ConfigError:
    near = difflib.get_close_matches(name, connected, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    shown = ", ".join(connected[:8]) + (f" and {len(connected) - 8} more" if len(connected) > 8 else "")
    return ConfigError(f"actor: expected one that is connected ({shown or 'none'}), saw {name}{hint}")
