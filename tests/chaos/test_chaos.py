"""A11: exactly one action per observation, contiguous steps, no unroll that mixes sessions, under any mix of faults."""

import pytest

from tests.chaos.faults import Kind, every, schedule
from tests.chaos.ledger import Ledger
from tests.chaos.report import DROP, FAILOVER_SECONDS, markdown
from tests.chaos.run import ChaosSettings, run_chaos
from tests.chaos.settings import from_words


def test_schedule_of_the_same_seed_is_the_same_and_of_another_is_not() -> None:
    assert schedule(7, 60, 4) == schedule(7, 60, 4)
    assert schedule(7, 60, 4) != schedule(8, 60, 4)
    assert every(7, 300, 30, 4) == every(7, 300, 30, 4)


@pytest.mark.parametrize("seed", range(5))
def test_schedule_of_minutes_has_every_kind_of_fault_in_order_of_time(seed: int) -> None:
    faults = schedule(seed, 300, actors=4)
    assert {fault.kind for fault in faults} == set(Kind)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert {fault.actor for fault in faults} == {-1, 0, 1, 2, 3}


def test_settings_from_words_have_the_types_of_the_defaults() -> None:
    assert from_words(ChaosSettings, ["seconds=20", "seed=3"]) == ChaosSettings(seconds=20.0, seed=3)
    with pytest.raises(SystemExit, match="sed: not one of seconds, seed"):
        from_words(ChaosSettings, ["sed=3"])


def test_ledger_tells_counters_that_fall_from_a_learner_that_resumes() -> None:
    ledger, saved = Ledger(), {"serving": {"env_steps": 100}}
    ledger.look(1, {"seedrl_env_steps_total": 150.0, "seedrl_ready": 1.0}, saved)
    ledger.look(1, {"seedrl_env_steps_total": 180.0, "seedrl_ready": 0.0}, saved)
    ledger.look(2, {}, saved)
    ledger.look(2, {"seedrl_env_steps_total": 120.0}, saved)
    assert ledger.fallen == []
    assert ledger.lost_steps == 80
    ledger.look(2, {"seedrl_env_steps_total": 119.0}, {"serving": {"env_steps": 99}})
    assert ledger.fallen == [
        "checkpoint: seedrl_env_steps_total fell from 100 to 99",
        "running: seedrl_env_steps_total fell from 120 to 119",
    ]
    ledger.look(3, {"seedrl_env_steps_total": 98.0}, {})
    assert ledger.fallen[2:] == ["resumed: seedrl_env_steps_total fell from 99 to 98"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_chaos_of_some_seconds_breaks_nothing() -> None:
    report = run_chaos(ChaosSettings(seconds=10, seed=87, actors=2, stretch=0))
    assert report["broken"] == {}, markdown(report)
    assert len(report["failovers"]) == 1


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "size"), [(7, 5), (8, 512)], ids=["messages", "shared-memory"])
def test_chaos_of_a_minute_breaks_nothing_and_recovers_in_time(seed: int, size: int) -> None:
    report = run_chaos(ChaosSettings(seconds=60, seed=seed, size=size))
    page = markdown(report)
    print(page)
    assert report["broken"] == {}, page
    assert max(each["stream_seconds"] or 0 for each in report["failovers"]) <= FAILOVER_SECONDS, page
    assert report["drop_under_churn"] < DROP, page
