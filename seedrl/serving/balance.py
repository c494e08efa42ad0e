"""Chooses the endpoint for an actor, if there are several. Knows nothing of gRPC, nor how rows travel between them.

The code that connects endpoints calls two methods, at least every few seconds: `own` returns the row for the others,
and `see` takes the rows of all. An endpoint that has received no rows knows only itself and redirects no actor.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from seedrl.serving.sessions import SessionTable
from seedrl.wire.security import is_socket

NEAR_TIE = 1.1  # factor by which another endpoint has to be better
TOO_MUCH = 1.5  # factor by which another endpoint has to be better to move an open session
RECENT_SECONDS = 10.0  # reports older than that say nothing about now
MEASURED_SECONDS = 60.0  # a round trip is remembered after the last report, so that a slow endpoint stays avoided
SEEN_SECONDS = 10.0  # an endpoint without a row for this long counts as gone
ARRIVING_SECONDS = 3.0  # until an actor that was sent somewhere is seen there
OVERLOAD_SECONDS = 5.0  # of overload before a session moves, and between two moves


class LearnerEndpoint(NamedTuple):
    """The state of one of the learner's endpoints. Numbers and strings only: it travels as JSON."""

    address: str
    free: int  # slots
    slots: int  # all of them
    round_trip: float  # seconds, as its actors measured recently; 0 if none has
    is_open: bool  # takes new actors

    @property
    def taken(self) -> int:
        return self.slots - self.free


class Seen(NamedTuple):
    """A snapshot of the other endpoints."""

    time: float
    others: tuple[LearnerEndpoint, ...]


class ExpectedSession(NamedTuple):
    """Slots that an actor on its way will take."""

    time: float
    address: str
    envs: int


class Balance:
    """`own` and `see` are for any thread; everything else belongs to the server thread."""

    def __init__(
        self, sessions: SessionTable, seed: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.address = ""  # by which actors reach this endpoint; the server sets it
        self._sessions = sessions
        self._random = random.Random(seed)
        self._clock = clock
        self._measured = (0.0, float("-inf"))  # newest round trip, and when
        self._seen = Seen(float("-inf"), ())  # newest
        self._counted = self._seen  # with which the expected sessions were last compared
        self._arriving: deque[ExpectedSession] = deque()  # redirected from here
        self._too_much_since: float | None = None

    def own(self) -> LearnerEndpoint:
        """Return the row of this endpoint, for the other ones."""
        sessions = self._sessions
        slots = sessions.config.serving.max_slots
        return LearnerEndpoint(self.address, slots - sessions.slots_taken, slots, self._round_trip(), sessions.is_open)

    def see(self, endpoints: Sequence[LearnerEndpoint]) -> None:
        """Replace what is known of all endpoints; this one may be among them."""
        self._seen = Seen(self._clock(), tuple(each for each in endpoints if each.address != self.address))

    def choose(self, envs: int, is_sent: bool = False) -> str | None:
        """Return the address for a new actor; None for this one. An actor that `is_sent` here stays if it can."""
        others = self._others(envs)
        here = self.own()
        can_stay = here.is_open and here.free >= envs
        if not others or (can_stay and is_sent):
            return None
        chosen = self._better_of_two([*others, here] if can_stay else others, envs)
        if can_stay and _cost(here, envs, here, chosen) <= NEAR_TIE * _cost(chosen, envs, here, chosen):
            return None
        return self._send(chosen, envs)

    def elsewhere(self, envs: int, actors: int = 1) -> list[str] | None:
        """Return another address for each of these actors; None if there is no room for all of them."""
        addresses: list[str] = []
        before = self._arriving.copy()
        for _ in range(actors):
            others = self._others(envs)
            if not others:
                self._arriving = before
                return None
            addresses.append(self._send(self._better_of_two(others, envs), envs))
        return addresses

    @property
    def has_others(self) -> bool:
        """Return whether there is another endpoint that takes actors."""
        return bool(self._others(0))

    def overload(self) -> str | None:
        """Return where one session should move because this endpoint is overloaded; called about twice a second.

        Only the fullest endpoint moves sessions, after some seconds of overload, and one at a time. It would not be
        emptier than the other one afterwards, so nothing moves back.
        """
        now, envs = self._clock(), self._sessions.config.actors.envs
        chosen = self._far_better(envs) if self._sessions.movable else None
        if chosen is None:
            self._too_much_since = None
        elif self._too_much_since is None:
            self._too_much_since = now
        elif now - self._too_much_since >= OVERLOAD_SECONDS:
            self._too_much_since = None
            return self._send(chosen, envs)
        return None

    def _far_better(self, envs: int) -> LearnerEndpoint | None:
        others = self._others(envs)
        if not others:
            return None
        here = self.own()
        best = min(others, key=lambda each: _cost(each, envs, here, *others))
        is_fullest = all(_rank(here) > _rank(each) for each in self._seen.others)
        stays_fuller = _fullness(here, -envs) >= _fullness(best, envs)
        is_far = _cost(here, 0, here, best) > TOO_MUCH * _cost(best, envs, here, best)
        return best if is_fullest and stays_fuller and is_far else None

    def _others(self, envs: int) -> list[LearnerEndpoint]:
        """Return the other endpoints that are open and have room, expected sessions counted."""
        seen, now = self._seen, self._clock()
        if not seen.others or now - seen.time > SEEN_SECONDS:
            return []
        self._forget_arrived(seen, now)
        counted = [each._replace(free=each.free - self._arriving_at(each.address)) for each in seen.others]
        return [each for each in counted if each.is_open and each.free >= envs]

    def _arriving_at(self, address: str) -> int:
        return sum(arrival.envs for arrival in self._arriving if arrival.address == address)

    def _forget_arrived(self, seen: Seen, now: float) -> None:
        """Stop counting redirected actors that their new endpoint counts itself, or that take too long to arrive."""
        if seen is not self._counted:
            before = {each.address: each.free for each in self._counted.others}
            joined = {each.address: before.get(each.address, each.free) - each.free for each in seen.others}
            for arrival in list(self._arriving):
                if joined.get(arrival.address, 0) >= arrival.envs:
                    joined[arrival.address] -= arrival.envs
                    self._arriving.remove(arrival)
            self._counted = seen
        while self._arriving and now - self._arriving[0].time > ARRIVING_SECONDS:
            self._arriving.popleft()

    def _send(self, endpoint: LearnerEndpoint, envs: int) -> str:
        self._arriving.append(ExpectedSession(self._clock(), endpoint.address, envs))
        return endpoint.address

    def _better_of_two(self, endpoints: list[LearnerEndpoint], envs: int) -> LearnerEndpoint:
        """Return the cheaper of two random endpoints: nearly as even as the best, without herding on old rows."""
        two = self._random.sample(endpoints, min(2, len(endpoints)))
        return min(two, key=lambda each: _cost(each, envs, *two))

    def _round_trip(self) -> float:
        now = self._clock()
        requests, seconds = self._sessions.round_trips(since=now - RECENT_SECONDS)
        if requests:
            self._measured = (seconds / requests, now)
        value, when = self._measured
        return value if now - when <= MEASURED_SECONDS else 0.0


def _fullness(endpoint: LearnerEndpoint, more: int = 0) -> float:
    return (endpoint.taken + more) / endpoint.slots


def _rank(endpoint: LearnerEndpoint) -> tuple[bool, float, str]:
    """Return a key that orders endpoints alike everywhere; one that is closed to new actors comes first."""
    return endpoint.is_open, _fullness(endpoint), endpoint.address


def _cost(endpoint: LearnerEndpoint, more: int, *compared: LearnerEndpoint) -> float:
    """Return the expected cost with `more` slots taken: the round trip times the fullness.

    An endpoint without measurements counts as being as fast as the fastest one it is compared with.
    """
    fastest = min((each.round_trip for each in compared if each.round_trip > 0), default=1.0)
    return (endpoint.round_trip or fastest) * _fullness(endpoint, more)


def own_address(advertise: str, bound: str) -> str:
    """Return the address of an endpoint for actors: what is advertised, HOST or HOST:PORT, or where it listens."""
    if not advertise or is_socket(bound):
        return bound
    has_port = advertise.rpartition(":")[2].isdigit() and not advertise.endswith("]")
    return advertise if has_port else f"{advertise}:{bound.rpartition(':')[2]}"
