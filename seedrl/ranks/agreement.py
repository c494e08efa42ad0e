"""A round of agreement: what every rank says, and what follows from it for all of them alike.

Knows nothing of how it travels. Ranks have rounds all the time, so that none is ever left alone in a collective step:
there is an update only after all that have actors have said that they have a train batch, and an end only after one has
asked for it.
"""

from collections.abc import Sequence
from typing import NamedTuple

from seedrl.run.stopping import Progress

STATUSES = ("", "done", "interrupted", "failed")  # how a rank wants to end; the first: not at all


class Load(NamedTuple):
    """Of a rank's endpoint: what actors are shared out by."""

    free: int = 0  # slots
    slots: int = 0
    round_trip: float = 0.0  # seconds, mean; 0 for not measured yet
    is_open: bool = False  # to new actors


class Vote(NamedTuple):
    """By one rank, in one round."""

    has_batch: bool = False
    is_idle: bool = False  # it has no actors, so that there will be no train batch either
    stop: str = ""  # one of STATUSES
    is_save_due: bool = False
    knows_spaces: bool = False
    progress: Progress = Progress()
    load: Load = Load()

    def row(self) -> list[float]:
        flags = (self.has_batch, self.is_idle, STATUSES.index(self.stop), self.is_save_due, self.knows_spaces)
        return [float(number) for number in (*flags, *self.progress, *self.load)]

    @classmethod
    def of(cls, row: Sequence[float]) -> "Vote":
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
    """By all ranks: the same everywhere."""

    said: tuple[Vote, ...] = (Vote(),)  # by rank

    @property
    def is_update_due(self) -> bool:
        """Nobody waits for a rank without actors, which takes part with nothing of its own."""
        anybody_has = any(said.has_batch for said in self.said)
        return anybody_has and all(said.has_batch or said.is_idle for said in self.said)

    @property
    def are_all_idle(self) -> bool:
        return all(said.is_idle for said in self.said)

    @property
    def is_save_due(self) -> bool:
        """Rank 0 keeps the time."""
        return self.said[0].is_save_due

    @property
    def stopper(self) -> int | None:
        """The rank that all stop for: one that failed, or the first that wants to."""
        wishes = [(STATUSES.index(said.stop), -rank) for rank, said in enumerate(self.said) if said.stop]
        return -max(wishes)[1] if wishes else None

    @property
    def first_with_spaces(self) -> int | None:
        """The first rank that knows the spaces."""
        return next((rank for rank, said in enumerate(self.said) if said.knows_spaces), None)

    @property
    def progress(self) -> Progress:
        """Of all ranks together."""
        env_steps, episodes, return_sum, return_count = (
            sum(column) for column in zip(*(said.progress for said in self.said), strict=True)
        )
        return Progress(int(env_steps), int(episodes), return_sum, int(return_count))

    @property
    def loads(self) -> list[Load]:
        return [said.load for said in self.said]
