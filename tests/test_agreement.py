"""What follows for all ranks from what each of them says."""

import pytest

from seedrl.ranks.agreement import STATUSES, Decision, Load, Vote
from seedrl.run.stopping import Progress


def said(**changes: object) -> Vote:
    return Vote()._replace(**changes)


def test_said_survives_its_way_as_numbers() -> None:
    whole = Vote(True, True, "interrupted", True, True, Progress(2**40, 3, -1.5, 7), Load(5, 9, 0.25, True))
    assert Vote.of(whole.row()) == whole
    assert Vote.of(Vote().row()) == Vote()
    assert len(whole.row()) == len(Vote().row())


def test_agreed_update_takes_a_batch_of_every_rank() -> None:
    assert Decision((said(has_batch=True), said(has_batch=True))).is_update_due
    assert not Decision((said(has_batch=True), said())).is_update_due


def test_agreed_update_does_not_wait_for_a_rank_without_actors() -> None:
    idle = said(is_idle=True)
    assert Decision((idle, said(has_batch=True))).is_update_due
    assert not Decision((idle, said(has_batch=True), said())).is_update_due
    assert not Decision((idle, idle)).is_update_due
    assert Decision((idle, idle)).are_all_idle
    assert not Decision((idle, said())).are_all_idle


@pytest.mark.parametrize(
    ("stops", "stopper"),
    [
        (["", "", ""], None),
        (["", "interrupted", "interrupted"], 1),
        (["interrupted", "", "failed"], 2),
        (["done", "done", "done"], 0),
    ],
)
def test_agreed_stopper_is_one_that_failed_or_the_first(stops: list[str], stopper: int | None) -> None:
    assert Decision(tuple(said(stop=stop) for stop in stops)).stopper == stopper


def test_agreed_save_is_rank_0s_to_ask_for() -> None:
    assert Decision((said(is_save_due=True), said())).is_save_due
    assert not Decision((said(), said(is_save_due=True))).is_save_due


def test_agreed_teller_is_the_first_that_knows_the_spaces() -> None:
    assert Decision((said(), said(knows_spaces=True), said(knows_spaces=True))).first_with_spaces == 1
    assert Decision((said(), said())).first_with_spaces is None


def test_agreed_progress_is_that_of_all_ranks() -> None:
    agreed = Decision((said(progress=Progress(10, 2, 8.0, 2)), said(progress=Progress(5, 1, 1.0, 1))))
    assert agreed.progress == Progress(15, 3, 9.0, 3)
    assert agreed.progress.return_mean == 3.0
    assert Progress().return_mean is None


def test_statuses_that_are_worse_come_later() -> None:
    assert STATUSES == ("", "done", "interrupted", "failed")
