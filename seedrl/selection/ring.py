"""The unrolls of a replay memory, which can be picked again and again until the oldest make room.

They are in places 0 to n-1 without a gap, so that a chooser can draw a place; the last one moves where one has left.
An unroll that is picked and not done never leaves. Knows nothing of rates.
"""

from collections import Counter, OrderedDict
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from seedrl.selection.base import NONE, Arrays, Entries, Pick, Priority

Places = NDArray[np.int64]

NOWHERE = -1  # the place of an entry whose unroll is not in the ring


class Choice(NamedTuple):
    places: Places  # [B]
    weight: NDArray[np.float32]  # [B]  importance weights


class Chooser(Protocol):
    """Draws places of a ring. Owned by the ring."""

    @property
    def mass(self) -> NDArray[np.float64]:
        """Return the number that each place has for the chooser, [capacity]; the ring writes it."""
        ...

    def mass_of(self, count: int, priority: Priority | None) -> NDArray[np.float64]:
        """Return the mass of `count` unrolls, NaN where it should stay; without priorities, that of new ones."""
        ...

    def changed(self, places: Places) -> None:
        """Take note of the mass that these places have now."""
        ...

    def choose(self, count: int, size: int) -> Choice:
        """Return `count` of the places below `size`."""
        ...

    def arrays(self) -> Arrays: ...

    def load(self, arrays: Arrays) -> None: ...


class Ring:
    """Owned by its selector."""

    def __init__(self, capacity: int, entries: int, chooser: Chooser, max_uses: int = 0) -> None:
        """`entries` are all of the store. With max_uses=0 unrolls are used any number of times."""
        self._chooser = chooser
        self._max_uses = max_uses
        self._order: OrderedDict[int, None] = OrderedDict()  # the entries of the unrolls, oldest first
        self._place = np.full(entries, NOWHERE)  # by entry
        self._picked: Entries = NONE  # of the train batch that is not done
        self._left: list[int] = []  # entries whose unrolls have left, until the store gets them back
        self._entry = np.zeros(capacity, np.int64)  # these three by place
        self._version = np.zeros(capacity, np.int64)
        self._uses = np.zeros(capacity, np.int64)
        self._dropped: Counter[str] = Counter()  # unrolls, by reason

    def __len__(self) -> int:
        return len(self._order)

    def add(self, entries: Entries, versions: Entries, priority: Priority | None = None, uses: int = 0) -> None:
        """Append unrolls; `versions` are not lower than those of the unrolls before."""
        places = np.arange(len(self), len(self) + len(entries))
        mass = self._chooser.mass_of(len(entries), priority)
        fallback = self._chooser.mass_of(len(entries), None)
        self._entry[places], self._version[places] = entries, versions
        self._uses[places] = uses
        self._chooser.mass[places] = np.where(np.isnan(mass), fallback, mass)
        self._place[entries] = places
        self._order.update(dict.fromkeys(entries.tolist()))
        self._chooser.changed(places)

    def choose(self, count: int) -> Pick:
        """Pick unrolls; the pick before is done."""
        places, weight = self._chooser.choose(count, len(self))
        entries = self._entry.take(places)
        self._uses[places] += 1  # once, even if it is twice in the batch
        self._picked = entries
        return Pick(entries, weight)

    def done(self, entries: Entries) -> Entries:
        """Note that a pick was copied; return entries that are free: also unrolls that were used often enough leave."""
        self._picked = NONE
        if self._max_uses:
            self._remove(np.unique(entries[self._uses[self._place[entries]] >= self._max_uses]))
        return self._take_left()

    def evict(self, count: int, keep: int) -> Entries:
        """Return `count` free entries or fewer: the oldest unrolls that are not picked leave; at least `keep` stay."""
        count = min(count - len(self._left), len(self) - keep)
        picked = set(self._picked.tolist())
        idle = (entry for entry in self._order if entry not in picked)
        entries = np.fromiter(islice(idle, max(0, count)), np.int64)
        self._dropped["unused"] += int(np.count_nonzero(self._uses[self._place[entries]] == 0))
        self._remove(entries)
        return self._take_left()

    def drop_older(self, version: int) -> None:
        """Let the unrolls of earlier policies than `version` leave, up to the first that is picked."""
        stale, picked = [], set(self._picked.tolist())
        for entry in self._order:
            if self._version[self._place[entry]] >= version or entry in picked:
                break
            stale.append(entry)
        self._dropped["stale"] += len(stale)
        self._remove(np.array(stale, np.int64))

    def reject(self, stale: Entries) -> None:
        """Take no unroll that is too old already."""
        self._dropped["stale"] += len(stale)
        self._left += stale.tolist()

    def prefer(self, entries: Entries, priority: Priority) -> None:
        """Set new priorities; unrolls that have left meanwhile are ignored, and priorities that are not finite."""
        mass = self._chooser.mass_of(len(entries), priority)
        places = self._place[entries]
        is_known = (places != NOWHERE) & ~np.isnan(mass)
        places = places[is_known]
        self._chooser.mass[places] = mass[is_known]
        self._chooser.changed(places)

    def take_dropped(self) -> dict[str, int]:
        """Return by reason how many unrolls were dropped since the last call."""
        dropped, self._dropped = self._dropped, Counter()
        return dict(dropped)

    def _take_left(self) -> Entries:
        if not self._left:
            return NONE
        left, self._left = self._left, []
        return np.array(left, np.int64)

    def _remove(self, entries: Entries) -> None:
        """Let unrolls leave, and let the last ones move to their places."""
        columns = (self._entry, self._version, self._uses, self._chooser.mass)
        changed = []
        for entry in entries.tolist():
            del self._order[entry]
            place, last = self._place[entry], len(self._order)
            self._place[self._entry[last]] = place
            self._place[entry] = NOWHERE
            for column in columns:
                column[place] = column[last]
            self._chooser.mass[last] = 0.0
            changed += [place, last]
            self._left.append(entry)
        if changed:
            self._chooser.changed(np.array(changed, np.int64))

    # For checkpoints.

    def known(self) -> Entries:
        """Return the entries, oldest first."""
        return np.fromiter(self._order, np.int64)

    def arrays(self) -> Arrays:
        """Return everything but the entries, oldest first."""
        places = self._place[self.known()]
        columns = {"version": self._version, "uses": self._uses, "mass": self._chooser.mass}
        chooser = {f"chooser.{name}": array for name, array in self._chooser.arrays().items()}
        return {"place": places, **{name: column[places] for name, column in columns.items()}, **chooser}

    def load(self, entries: Entries, arrays: Arrays) -> None:
        """Restore `arrays` to an empty ring whose unrolls are in these entries."""
        places = arrays["place"]
        self._order.update(dict.fromkeys(entries.tolist()))
        self._place[entries], self._entry[places] = places, entries
        self._version[places], self._uses[places] = arrays["version"], arrays["uses"]
        self._chooser.mass[places] = arrays["mass"]
        self._chooser.changed(places)
        start = "chooser."
        own = {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
        self._chooser.load(own)
