"""Populations: who takes over from whom, what changes, and that an interrupted one continues as it would have."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from seedrl.commandline.checking import checked
from seedrl.commandline.main import compose, vocabulary
from seedrl.commandline.members import Member, Score, Status, write_table
from seedrl.commandline.population import JOURNAL, Population, constant_schedules
from seedrl.commandline.search import split
from seedrl.errors import ConfigError
from seedrl.monitoring.lineage import draw_lineage

RUN = vocabulary("run")
RATE = "algorithm.learning_rate"
Started = dict[int, list[str]]  # overrides by run


def population(directory: Path, *overrides: str) -> Population:
    given = ("sweep.population=4", "sweep.generations=3", f"{RATE}=tag(log,interval(1e-6,1e-4))", *overrides)
    fixed, varied = split(checked(RUN, given, is_sweep=True))
    return Population(compose("run", fixed), RUN, varied, directory)


def ask_all(search: Population) -> Started:
    """Return the runs that may start now."""
    started: Started = {}
    while (asked := search.ask()) is not None:
        started[asked[0]] = asked[1]
    return started


def rate_of(overrides: list[str]) -> float:
    return float(next(each for each in overrides if each.startswith(RATE)).partition("=")[2])


def parent_of(overrides: list[str]) -> int | None:
    found = [each for each in overrides if each.startswith("init_from=")]
    return int(Path(found[0].partition("=")[2].strip("'")).name) if found else None


def evolve(search: Population, score: Callable[[int, list[str]], float | None]) -> Started:
    """Run the whole population; `score` is what a run with these overrides reaches."""
    everything: Started = {}
    while started := ask_all(search):
        everything |= started
        for number, overrides in started.items():
            search.tell(number, steady(score(number, overrides)))
    return everything


def steady(score: float | None) -> Score | None:
    """Return the score of a run whose mean return was always the same."""
    return None if score is None else Score(score, score)


def test_members_start_inside_the_interval_with_seeds_of_their_own(tmp_path: Path) -> None:
    started = ask_all(population(tmp_path, "seed=7"))
    assert list(started) == [0, 1, 2, 3]
    rates = [rate_of(each) for each in started.values()]
    assert all(1e-6 <= rate <= 1e-4 for rate in rates)
    assert len(set(rates)) == 4
    assert [each[-1] for each in started.values()] == ["seed=7", "seed=8", "seed=9", "seed=10"]


def test_members_take_the_values_of_a_list_in_turn(tmp_path: Path) -> None:
    started = ask_all(population(tmp_path, "algorithm.unroll_length=16,32"))
    assert [each[1] for each in started.values()] == [f"algorithm.unroll_length={n}" for n in (16, 32, 16, 32)]


def test_generation_begins_once_all_of_the_one_before_have_ended(tmp_path: Path) -> None:
    search = population(tmp_path)
    ask_all(search)
    for number in range(3):
        search.tell(number, steady(1.0))
        assert search.ask() is None
    search.tell(3, steady(1.0))
    assert list(ask_all(search)) == [4, 5, 6, 7]


def test_worst_takes_over_from_the_best_and_all_others_continue(tmp_path: Path) -> None:
    search = population(tmp_path, "sweep.factor=4")
    first = ask_all(search)
    for number, score in enumerate([10.0, 40.0, None, 20.0]):  # the third has failed
        search.tell(number, steady(score))
    second = ask_all(search)
    assert [parent_of(each) for each in second.values()] == [0, 1, 1, 3]
    assert [rate_of(second[4 + member]) for member in (0, 1, 3)] == [rate_of(first[member]) for member in (0, 1, 3)]
    changed = rate_of(second[6]) / rate_of(first[1])
    assert min(abs(math.log(changed / 4)), abs(math.log(changed * 4))) < 1e-3


def test_member_that_was_lucky_once_is_ranked_by_its_newest_return(tmp_path: Path) -> None:
    search = population(tmp_path)
    ask_all(search)
    for number, score in enumerate([Score(90.0, 5.0), Score(40.0, 40.0), Score(20.0, 20.0), Score(30.0, 30.0)]):
        search.tell(number, score)
    second = ask_all(search)
    assert [parent_of(each) for each in second.values()] == [1, 1, 2, 3]


def test_population_ends_with_a_run_that_was_at_the_goal_although_its_newest_return_is_below(tmp_path: Path) -> None:
    search = population(tmp_path, "stop.return_mean_100=100")
    ask_all(search)
    for number in range(4):
        search.tell(number, Score(100.5, 99.5) if number == 2 else Score(0.0, 0.0))
    assert ask_all(search) == {}


def test_journal_says_in_words_what_was_decided(tmp_path: Path) -> None:
    search = population(tmp_path)
    ask_all(search)
    for number, score in enumerate([10.0, 40.0, 5.0, 20.0]):
        search.tell(number, steady(score))
    ask_all(search)
    lines = [json.loads(line) for line in (tmp_path / JOURNAL).read_text().splitlines()]
    assert [(each["generation"], each["run"], each["score"]) for each in lines[1:5]] == [
        (0, 1, 40.0),
        (0, 2, 5.0),
        (0, 3, 20.0),
        (1, 4, None),
    ]
    assert lines[0]["because"].startswith(f"starts with {RATE}=")
    assert lines[4]["because"] == "continues: number 3 of 4 with a return of 10.00"
    assert "takes the weights of member 1, which had a return of 40.00" in lines[6]["because"]
    draw_lineage(tmp_path / JOURNAL, tmp_path / "lineage.png")
    assert (tmp_path / "lineage.png").read_bytes().startswith(b"\x89PNG")


def test_population_leaves_bad_settings_behind(tmp_path: Path) -> None:
    """The score is largest at 3e-3, thirty times what any member starts with at most."""
    search = population(tmp_path, "sweep.population=8", "sweep.generations=20", "sweep.factor=2")
    found = evolve(search, lambda _, overrides: -abs(math.log(rate_of(overrides) / 3e-3)))
    best = [min(abs(math.log(rate_of(found[run]) / 3e-3)) for run in range(g * 8, g * 8 + 8)) for g in range(20)]
    assert best[0] > math.log(25)
    assert best[-1] < math.log(2)


def test_population_ends_with_the_generation_in_which_the_goal_is_reached(tmp_path: Path) -> None:
    search = population(tmp_path, "stop.return_mean_100=100")
    found = evolve(search, lambda number, _: 150.0 if number == 5 else 0.0)
    assert max(found) == 7


@pytest.mark.parametrize("ended", [3, 4, 6, 9])
def test_population_that_was_interrupted_decides_as_it_would_have(tmp_path: Path, ended: int) -> None:
    def score(number: int, _: list[str]) -> float | None:
        return None if number == 2 else float(number * 7 % 5)

    for name in ("whole", "part"):
        (tmp_path / name).mkdir()
    whole, part = evolve(population(tmp_path / "whole"), score), tmp_path / "part"
    members = [
        Member(n, whole[n], part / str(n), Status.FAILED if n == 2 else Status.DONE, 10, score(n, []), score(n, []))
        for n in range(ended)
    ]
    write_table(part, members)
    again = evolve(population(part), score)
    expected = {n: [each.replace("whole", "part") for each in overrides] for n, overrides in whole.items()}
    assert again == expected


def test_schedules_are_constant_unless_the_line_says_otherwise() -> None:
    assert constant_schedules(["env=pong"]) == ["algorithm.learning_rate_end=null", "algorithm.entropy_cost_end=null"]
    assert constant_schedules(["algorithm.learning_rate_end=0"]) == ["algorithm.entropy_cost_end=null"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["sweep.population=1"], "sweep.population=1 must be at least 2"),
        (["sweep.generations=0"], "sweep.generations=0 must be at least 1"),
        (["sweep.factor=1"], "sweep.factor=1 must be larger than 1"),
        (["sweep.trials=3"], "two ways to choose values"),
    ],
)
def test_population_that_cannot_evolve_is_refused(tmp_path: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        population(tmp_path, *overrides)


def test_population_without_a_setting_to_change_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a setting to change"):
        Population(compose("run", ["sweep.population=4"]), RUN, [], tmp_path)
