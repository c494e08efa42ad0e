"""Actors of a cluster stream to a rank on their own machine if that keeps the ranks balanced."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seedrl.launching.assignment import assign_ranks


@pytest.mark.parametrize(
    ("actors", "ranks", "expected"),
    [
        ("bbaa", "ab", [1, 1, 0, 0]),  # in turns, every second one would stream to the other machine
        ("aabb", "ab", [0, 0, 1, 1]),
        ("aaaa", "ab", [0, 0, 1, 1]),
        ("cacb", "ab", [0, 0, 1, 1]),
        ("aabb", "abc", [0, 0, 1, 2]),
        ("aaaa", "aa", [0, 1, 0, 1]),  # one machine: in turns
        ("aaa", "ab", [0, 0, 1]),
        ("a", "ba", [1]),
    ],
)
def test_actors_stream_to_their_own_machine_first(actors: str, ranks: str, expected: list[int]) -> None:
    found = assign_ranks(dict(enumerate(actors)), list(ranks), kept={})
    assert [found[number] for number in sorted(found)] == expected


def test_actor_that_comes_later_leaves_those_that_run_where_they_are() -> None:
    found = assign_ranks({0: "a", 1: "b", 2: "a", 3: ""}, ["a", "b"], kept={0: 1, 1: 1})
    assert (found[0], found[1]) == (1, 1)
    assert (found[2], found[3]) == (0, 0)


machines = st.sampled_from(["a", "b", "c", ""])


@given(st.lists(machines), st.lists(machines.filter(bool), min_size=1, max_size=5))
def test_assignment_is_balanced_and_no_actor_could_swap_for_a_rank_of_its_own_machine(
    actors: list[str], ranks: list[str]
) -> None:
    found = assign_ranks(dict(enumerate(actors)), ranks, kept={})
    assert sorted(found) == list(range(len(actors)))
    counts = [list(found.values()).count(rank) for rank in range(len(ranks))]
    assert max(counts) - min(counts) <= 1
    share = len(actors) // len(ranks)
    for machine in {*ranks}:
        own = [rank for rank, where in enumerate(ranks) if where == machine]
        here = [number for number, where in enumerate(actors) if where == machine]
        local = sum(found[number] in own for number in here)
        assert local >= min(len(here), share * len(own))
