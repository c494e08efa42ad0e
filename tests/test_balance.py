"""Tests of which endpoint an actor is sent to: session tables that hear of each other, seeded chance, a fake clock."""

import json

import pytest

from seedrl.config import LearnerConfig
from seedrl.serving import balance as module
from seedrl.serving.balance import Balance, LearnerEndpoint, own_address
from seedrl.serving.seats import planned_seats
from seedrl.serving.sessions import Session, SessionTable
from seedrl.wire.messages import Hello, Report
from tests.fakes import FakeClock

ENVS = 4
SLOTS = 400
FAST, SLOW = 0.002, 0.042


class Cluster:
    """Endpoints `a`, `b`, … with real leases; `agree` lets all of them hear of each other."""

    def __init__(self, names: str, slots: int = SLOTS, seed: int = 1) -> None:
        self.clock = FakeClock()
        self.tables: dict[str, SessionTable] = {}
        self.balances: dict[str, Balance] = {}
        self.moves: list[tuple[str, str]] = []
        for number, name in enumerate(names):
            config = LearnerConfig()
            config.serving.max_slots, config.actors.envs = slots, ENVS
            self.tables[name] = SessionTable(config, lambda session_id: session_id, planned_seats(config))
            self.balances[name] = Balance(self.tables[name], seed=seed + number, clock=self.clock)
            self.balances[name].address = name
        self.agree()

    def __getitem__(self, name: str) -> Balance:
        return self.balances[name]

    def agree(self) -> None:
        rows = [balance.own() for balance in self.balances.values()]
        told = [LearnerEndpoint(*row) for row in json.loads(json.dumps(rows))]  # as it travels
        for balance in self.balances.values():
            balance.see(told)

    def join(self, name: str) -> Session:
        return self.tables[name].join(Hello("actor"))[0]

    def fill(self, **actors: int) -> None:
        for name, count in actors.items():
            for _ in range(count):
                self.join(name)
        self.agree()

    def measure(self, **round_trips: float) -> None:
        """Every actor of these endpoints reports."""
        for name, seconds in round_trips.items():
            for session in self.tables[name].open.values():
                session.reports.recent = Report(requests=100, round_trip_seconds=100 * seconds)
                session.reports.received = self.clock()
        self.agree()

    def arrive(self, at: str) -> str:
        """A new actor finds its endpoint, as the server and the actor have it; returns which."""
        place, is_sent = at, False
        for _ in range(3):
            address = self.balances[place].choose(ENVS, is_sent)
            if address is None:
                break
            place, is_sent = address, True
        self.join(place)
        return place

    def rebalance(self, seconds: float) -> None:
        """Do what the main loop of every learner does twice a second; agreements come as often."""
        for _ in range(int(2 * seconds)):
            self.clock.advance(0.5)
            for name, balance in self.balances.items():
                address = balance.overload()
                if address is not None:
                    table = self.tables[name]
                    table.leave(table.open[max(table.open)])
                    self.join(address)
                    self.moves.append((name, address))
            self.agree()

    def actors(self) -> dict[str, int]:
        return {name: len(table.open) for name, table in self.tables.items()}


# One endpoint.


def test_lone_endpoint_keeps_everybody_however_full_or_closed() -> None:
    lone = Cluster("a", slots=2 * ENVS)
    assert lone["a"].own() == ("a", 8, 8, 0.0, True)
    for _ in range(3):
        assert lone["a"].choose(ENVS) is None
        lone["a"].see([])
        if lone.actors()["a"] < 2:
            lone.join("a")
    lone.tables["a"].is_open = False
    assert lone["a"].choose(ENVS) is None
    assert lone["a"].elsewhere(ENVS) is None
    assert lone["a"].overload() is None
    assert not lone["a"].has_others


@pytest.mark.parametrize(
    ("advertise", "bound", "address"),
    [
        ("", "127.0.0.1:50051", "127.0.0.1:50051"),
        ("learner-1", "0.0.0.0:50051", "learner-1:50051"),
        ("learner-1:7", "0.0.0.0:50051", "learner-1:7"),
        ("[fe80::1]", "[::]:50051", "[fe80::1]:50051"),
        ("[fe80::1]:7", "[::]:50051", "[fe80::1]:7"),
    ],
)
def test_own_address_is_what_is_advertised_with_the_port_that_was_found(
    advertise: str, bound: str, address: str
) -> None:
    assert own_address(advertise, bound) == address


# New actors.


@pytest.mark.parametrize("seed", range(5))
def test_actors_that_all_knock_at_one_of_many_endpoints_spread_nearly_evenly(seed: int) -> None:
    cluster = Cluster("abcdefgh", seed=seed)
    for number in range(400):
        cluster.arrive("a")
        cluster.clock.advance(0.02)
        if number % 25 == 0:  # the news are half a second old at times
            cluster.agree()
    counts = cluster.actors().values()
    assert sum(counts) == 400
    assert min(counts) >= 40  # 50 each
    assert max(counts) <= 60


def test_burst_of_actors_between_two_agreements_is_no_herd_to_one_place() -> None:
    cluster = Cluster("abc")
    cluster.fill(a=10)
    for _ in range(32):
        cluster.arrive("a")  # at one instant
    assert cluster.actors() == {
        "a": pytest.approx(14, abs=2),
        "b": pytest.approx(14, abs=2),
        "c": pytest.approx(14, abs=2),
    }


def test_actors_of_a_near_tie_stay() -> None:
    cluster = Cluster("ab")
    cluster.fill(a=10, b=10)
    cluster.measure(a=1.05 * FAST, b=FAST)
    assert all(cluster["a"].choose(ENVS) is None for _ in range(20))


def test_slow_endpoint_is_avoided_in_proportion_and_by_its_own_as_well() -> None:
    cluster = Cluster("abc")
    cluster.fill(a=2, b=2, c=2)
    cluster.measure(a=FAST, b=SLOW, c=FAST)
    assert cluster["b"].choose(ENVS) in ("a", "c")
    for _ in range(100):
        cluster.arrive("a")
        cluster.clock.advance(0.1)
        cluster.agree()
    assert cluster.actors()["b"] <= 5


def test_round_trip_is_of_late_and_remembered_for_a_while() -> None:
    cluster = Cluster("ab")
    cluster.fill(b=1)
    cluster.measure(b=SLOW)
    assert cluster["b"].own().round_trip == pytest.approx(SLOW)
    cluster.measure(b=FAST)  # not since the beginning of time
    assert cluster["b"].own().round_trip == pytest.approx(FAST)
    (session,) = cluster.tables["b"].open.values()
    cluster.tables["b"].leave(session)
    cluster.clock.advance(module.MEASURED_SECONDS - 1)
    assert cluster["b"].own().round_trip == pytest.approx(FAST)
    cluster.clock.advance(2)
    assert cluster["b"].own().round_trip == 0.0


def test_endpoint_that_nobody_has_measured_counts_by_how_full_it_is() -> None:
    cluster = Cluster("ab")
    cluster.fill(a=3, b=1)
    cluster.measure(a=SLOW)
    assert cluster["a"].choose(ENVS) == "b"
    cluster.clock.advance(module.ARRIVING_SECONDS + 1)
    cluster.fill(b=3)
    assert cluster["a"].choose(ENVS) is None


def test_full_and_closed_endpoints_are_never_chosen() -> None:
    cluster = Cluster("abcd", slots=10 * ENVS)
    cluster.fill(a=9, b=10, c=1)
    cluster.tables["c"].is_open = False
    cluster.agree()
    for _ in range(200):
        assert cluster["a"].choose(ENVS) in (None, "d")
        cluster.clock.advance(module.ARRIVING_SECONDS / 5)
        cluster.agree()


def test_full_or_closed_endpoint_sends_everybody_on_and_keeps_them_if_there_is_nowhere() -> None:
    cluster = Cluster("ab", slots=2 * ENVS)
    cluster.tables["a"].is_open = False
    cluster.agree()
    assert cluster["a"].choose(ENVS) == "b"
    assert cluster["a"].choose(ENVS, is_sent=True) == "b"  # the second of two that are on their way
    assert cluster["a"].choose(ENVS) is None
    cluster.tables["a"].is_open = True
    cluster.fill(a=2)
    cluster.clock.advance(module.ARRIVING_SECONDS + 1)
    assert cluster["a"].choose(ENVS) == "b"


def test_actor_that_was_sent_stays_where_it_can_although_it_is_better_elsewhere() -> None:
    cluster = Cluster("ab")
    cluster.fill(a=50)
    assert cluster["a"].choose(ENVS, is_sent=True) is None
    assert cluster["a"].choose(ENVS) == "b"


def test_endpoints_not_heard_of_for_long_are_not_there() -> None:
    cluster = Cluster("ab")
    cluster.fill(a=50)
    cluster.clock.advance(module.SEEN_SECONDS + 1)
    assert cluster["a"].choose(ENVS) is None
    assert not cluster["a"].has_others
    cluster.agree()
    assert cluster["a"].choose(ENVS) == "b"


# Sessions that move.


def test_elsewhere_finds_a_place_for_all_or_for_none() -> None:
    cluster = Cluster("abc", slots=3 * ENVS)
    cluster.fill(a=3, b=1)
    places = cluster["a"].elsewhere(ENVS, actors=5)
    assert places is not None
    assert sorted(places) == ["b", "b", "c", "c", "c"]
    cluster.clock.advance(module.ARRIVING_SECONDS + 1)
    cluster.agree()
    assert cluster["a"].elsewhere(ENVS, actors=6) is None
    assert cluster["a"].elsewhere(ENVS, actors=5) is not None  # nothing of the failed plan is left


def test_overload_moves_one_at_a_time_until_it_is_near_even_and_nothing_comes_back() -> None:
    cluster = Cluster("abc")
    cluster.fill(a=12, b=6)
    cluster.rebalance(seconds=module.OVERLOAD_SECONDS - 1)
    assert cluster.moves == []  # not for a moment's sake
    cluster.rebalance(seconds=120)
    assert sum(cluster.actors().values()) == 18
    assert max(cluster.actors().values()) - min(cluster.actors().values()) <= 3
    moves = len(cluster.moves)
    assert moves <= 120 / module.OVERLOAD_SECONDS
    assert {place for _, place in cluster.moves} == {"c"}
    cluster.rebalance(seconds=300)
    assert len(cluster.moves) == moves


def test_empty_endpoint_among_many_alike_is_not_flooded() -> None:
    """As after the restart of one: only the fullest gives something away, and they take turns."""
    cluster = Cluster("abcdefgh")
    cluster.fill(a=4, b=4, c=4, d=4, e=4, f=4, g=4)
    cluster.rebalance(seconds=300)
    assert cluster.actors()["h"] in (2, 3)
    assert {place for _, place in cluster.moves} == {"h"}


@pytest.mark.parametrize("seed", range(5))
def test_round_trips_that_jump_about_make_nothing_oscillate(seed: int) -> None:
    cluster = Cluster("abcd", seed=seed)
    cluster.fill(a=8, b=8, c=8, d=8)
    chance = cluster["a"]._random
    for _ in range(60):
        cluster.measure(**{name: chance.uniform(0.5, 2.0) * FAST for name in "abcd"})
        cluster.rebalance(seconds=2)
    assert cluster.moves == []


def test_overload_moves_nobody_to_a_slow_endpoint_that_is_empty_on_purpose() -> None:
    cluster = Cluster("ab")
    cluster.fill(a=10, b=1)
    cluster.measure(a=FAST, b=SLOW)
    cluster.rebalance(seconds=9)  # as long as the reports count
    assert cluster.moves == []
    cluster.measure(a=FAST, b=FAST)
    cluster.rebalance(seconds=9)
    assert cluster.moves == [("a", "b")]
