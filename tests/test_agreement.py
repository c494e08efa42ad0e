"""The decision that follows for all ranks from the votes of each."""

import pytest

from seedrl.ranks.agreement import STATUSES, Decision, Load, Vote
from seedrl.run.stopping import Progress


def vote(**changes: object) -> Vote:
    return Vote()._replace(**changes)


def test_vote_survives_as_numbers() -> None:
    whole = Vote(True, True, "interrupted", True, True, Progress(2**40, 3, -1.5, 7), Load(5, 9, 0.25, True))
    assert Vote.from_row(whole.to_row()) == whole
    assert Vote.from_row(Vote().to_row()) == Vote()
    assert len(whole.to_row()) == len(Vote().to_row())


def test_update_takes_a_batch_of_every_rank() -> None:
    assert Decision((vote(has_batch=True), vote(has_batch=True))).is_update_due
    assert not Decision((vote(has_batch=True), vote())).is_update_due


def test_update_does_not_wait_for_an_idle_rank() -> None:
    idle = vote(is_idle=True)
    assert Decision((idle, vote(has_batch=True))).is_update_due
    assert not Decision((idle, vote(has_batch=True), vote())).is_update_due
    assert not Decision((idle, idle)).is_update_due
    assert Decision((idle, idle)).are_all_idle
    assert not Decision((idle, vote())).are_all_idle


@pytest.mark.parametrize(
    ("stops", "stopper"),
    [
        (["", "", ""], None),
        (["", "interrupted", "interrupted"], 1),
        (["interrupted", "", "failed"], 2),
        (["done", "done", "done"], 0),
    ],
)
def test_stopper_is_a_rank_that_failed_or_the_first(stops: list[str], stopper: int | None) -> None:
    assert Decision(tuple(vote(stop=stop) for stop in stops)).stopper == stopper


def test_save_is_due_when_it_is_due_for_rank_0() -> None:
    assert Decision((vote(is_save_due=True), vote())).is_save_due
    assert not Decision((vote(), vote(is_save_due=True))).is_save_due


def test_spaces_come_from_the_first_rank_that_knows_them() -> None:
    assert Decision((vote(), vote(knows_spaces=True), vote(knows_spaces=True))).first_with_spaces == 1
    assert Decision((vote(), vote())).first_with_spaces is None


def test_progress_is_that_of_all_ranks() -> None:
    decision = Decision((vote(progress=Progress(10, 2, 8.0, 2)), vote(progress=Progress(5, 1, 1.0, 1))))
    assert decision.progress == Progress(15, 3, 9.0, 3)
    assert decision.progress.return_mean == 3.0
    assert Progress().return_mean is None


def test_statuses_that_are_worse_come_later() -> None:
    assert STATUSES == ("", "done", "interrupted", "failed")
