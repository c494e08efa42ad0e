"""Assigns a rank to every actor of a cluster: one on its own machine if possible, and to each rank as many actors.

Balance comes first, because an update needs unrolls of every rank. Knows no engine.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence


def assign_ranks(actors: Mapping[int, str], ranks: Sequence[str], kept: Mapping[int, int]) -> dict[int, int]:
    """Return the rank of every actor.

    `actors` has the machine of each actor by its number (empty if it has none yet), `ranks` the machine of each rank,
    and `kept` the rank of those actors that must not change it.
    """
    share, extras = divmod(len(actors), len(ranks))  # each rank gets its share, and `extras` of them one more
    assigned = dict(kept)
    counts = [sum(rank == number for rank in kept.values()) for number in range(len(ranks))]

    def fill(has_room: Callable[[int, str], bool]) -> None:
        for number in sorted(actors.keys() - assigned.keys()):
            open_ranks = [rank for rank in range(len(ranks)) if has_room(rank, actors[number])]
            if open_ranks:
                assigned[number] = _least(open_ranks, counts)
                counts[assigned[number]] += 1

    def extras_left() -> bool:
        return sum(max(0, count - share) for count in counts) < extras

    fill(lambda rank, machine: ranks[rank] == machine and counts[rank] < share)
    fill(lambda rank, machine: ranks[rank] == machine and counts[rank] == share and extras_left())
    fill(lambda rank, machine: True)
    return assigned


def _least(ranks: Iterable[int], counts: Sequence[int]) -> int:
    return min(ranks, key=lambda rank: counts[rank])
