"""The times of faults: a schedule that follows from its seed. Knows nothing of processes."""

import random
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

CYCLE_SECONDS = 20.0  # faults of actors, then the learner is killed and comes back
ACTORS_SECONDS = 11.0  # of those: faults of actors
HOLE_SECONDS = 12.0  # until both ends have noticed


class Kind(Enum):
    """A fault, done to one actor unless it says otherwise; most are over at once, some last for `seconds`."""

    kill = "kill -9 of an actor, restarted at once"
    leave = "SIGTERM of an actor, restarted at once: it cancels its stream"
    stop = "SIGSTOP of an actor, SIGCONT after a while"
    cut = "connection cut"
    black_hole = "connection left half-open"
    delay = "50 ms of delay each way for a while"
    throttle = "100 KB/s each way for a while"
    kill_learner = "kill -9 of the learner, restarted at once"


LASTING = (Kind.stop, Kind.delay, Kind.throttle)
OF_ACTORS = tuple(kind for kind in Kind if kind is not Kind.kill_learner)


class Fault(NamedTuple):
    at: float  # seconds from the beginning
    kind: Kind
    actor: int  # -1 for the learner
    seconds: float = 0.0  # how long it lasts

    def __str__(self) -> str:
        who = "" if self.actor < 0 else f" actor-{self.actor}"
        return f"{self.at:6.1f} s  {self.kind.name}{who}" + (f" for {self.seconds:.1f} s" if self.seconds else "")


def schedule(seed: int, seconds: float, actors: int) -> list[Fault]:
    """Faults of a chaos run in order of time: cycles of faults of actors that end with the learner killed.

    After the first one, the actors may have no peace while the learner is away, either.
    """
    chance = random.Random(seed)
    faults: list[Fault] = []
    begin = 0.0
    while begin < seconds:
        end = min(begin + ACTORS_SECONDS, begin + 0.6 * (seconds - begin))
        faults += _faults_of_actors(chance, actors, begin, end)
        killed = end + chance.uniform(1.0, 2.0)
        faults.append(Fault(round(killed, 2), Kind.kill_learner, -1))
        if begin > 0 and chance.random() < 0.5:
            faults += _faults_of_actors(chance, actors, killed, killed + 3)
        begin += CYCLE_SECONDS
    return sorted(faults, key=lambda fault: fault.at)


def every(seed: int, seconds: float, pause: float, actors: int) -> list[Fault]:
    """Faults of a soak: one of an actor at every pause."""
    chance = random.Random(seed)
    return [_fault(chance, pause * number, range(actors)) for number in range(1, int(seconds / pause))]


def _faults_of_actors(chance: random.Random, actors: int, begin: float, end: float) -> Iterator[Fault]:
    """Whoever is in a black hole is mostly left there, to find out by itself."""
    holes: dict[int, float] = {}
    at = begin + chance.uniform(0.2, 1.0)
    while at < end:
        left_alone = {actor for actor, since in holes.items() if at < since + HOLE_SECONDS and chance.random() < 0.8}
        fault = _fault(chance, at, [actor for actor in range(actors) if actor not in left_alone] or [0])
        if fault.kind is Kind.black_hole:
            holes[fault.actor] = at
        yield fault
        at += chance.uniform(0.4, 1.6)


def _fault(chance: random.Random, at: float, actors: Sequence[int]) -> Fault:
    kind = chance.choice(OF_ACTORS)
    lasts = round(chance.uniform(0.5, 3.0), 1) if kind in LASTING else 0.0
    return Fault(round(at, 2), kind, chance.choice(actors), lasts)
