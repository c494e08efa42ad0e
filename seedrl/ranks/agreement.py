"""A round of agreement: the vote of each rank, and the decision that follows from all votes.

Knows nothing of how votes travel. All ranks compute the decision from the same votes, so it is the same on all of them,
and no rank ever enters a collective operation that the others do not enter: all of them make an update, or none.
"""

from collections.abc import Sequence
from typing import NamedTuple

from seedrl.run.stopping import Progress

STATUSES = ("", "done", "interrupted", "failed")  # how a rank wants to end; the first: not at all


class Load(NamedTuple):
    """The load of a rank's endpoint, by which actors are assigned to endpoints."""

    free: int = 0  # slots
    slots: int = 0
    round_trip: float = 0.0  # seconds, mean; 0 for not measured yet
    is_open: bool = False  # to new actors


class Vote(NamedTuple):
    """The vote of one rank in one round."""

    has_batch: bool = False
    is_idle: bool = False  # its actors deliver nothing, so that the other ranks should not wait for its train batch
    stop: str = ""  # one of STATUSES
    is_save_due: bool = False
    knows_spaces: bool = False
    progress: Progress = Progress()
    load: Load = Load()

    def to_row(self) -> list[float]:
        """Return the vote as numbers; every vote has the same number of them."""
        flags = (self.has_batch, self.is_idle, STATUSES.index(self.stop), self.is_save_due, self.knows_spaces)
        return [float(number) for number in (*flags, *self.progress, *self.load)]

    @classmethod
    def from_row(cls, row: Sequence[float]) -> "Vote":
        has_batch, is_idle, stop, is_save_due, knows_spaces, *numbers = row
        env_steps, episodes, return_sum, return_count, free, slots, round_trip, is_open = numbers
        return cls(
            has_batch=bool(has_batch),
            is_idle=bool(is_idle),
            stop=STATUSES[int(stop)],
            is_save_due=bool(is_save_due),
            knows_spaces=bool(knows_spaces),
            progress=Progress(int(env_steps), int(episodes), return_sum, int(return_count)),
            load=Load(int(free), int(slots), round_trip, bool(is_open)),
        )


class Decision(NamedTuple):
    """The consequences of the votes of all ranks."""

    votes: tuple[Vote, ...] = (Vote(),)  # by rank

    @property
    def is_update_due(self) -> bool:
        """Return whether some rank has a train batch and every other rank has one, too, or is idle.

        An idle rank without a train batch takes part with a blank one, which counts for nothing.
        """
        return any(vote.has_batch for vote in self.votes) and all(vote.has_batch or vote.is_idle for vote in self.votes)

    @property
    def are_all_idle(self) -> bool:
        return all(vote.is_idle for vote in self.votes)

    @property
    def is_save_due(self) -> bool:
        """Return whether rank 0, which writes the checkpoints, wants to save."""
        return self.votes[0].is_save_due

    @property
    def stopper(self) -> int | None:
        """Return the rank whose reason to stop is that of all: one that failed, or the first that wants to stop."""
        wishes = [(STATUSES.index(vote.stop), -rank) for rank, vote in enumerate(self.votes) if vote.stop]
        return -max(wishes)[1] if wishes else None

    @property
    def first_with_spaces(self) -> int | None:
        """Return the first rank that knows the spaces."""
        return next((rank for rank, vote in enumerate(self.votes) if vote.knows_spaces), None)

    @property
    def progress(self) -> Progress:
        """Return the progress of all ranks together."""
        env_steps, episodes, return_sum, return_count = (
            sum(column) for column in zip(*(vote.progress for vote in self.votes), strict=True)
        )
        return Progress(int(env_steps), int(episodes), return_sum, int(return_count))

    @property
    def loads(self) -> list[Load]:
        return [vote.load for vote in self.votes]
