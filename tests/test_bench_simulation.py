"""The simulation against closed forms: no queueing, each resource saturated, Little's law."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from bench import simulation
from bench.cluster import INFINITE, Costs, Link, Outcome, Shape, all_reduce_seconds, simulate
from bench.document import Document, read
from bench.harness import Report
from seedrl.errors import ConfigError

COSTS = Costs(step=0.02, message=200e-6, row=6e-6, batch=300e-6, batch_row=2e-6)
ENDLESS = Shape(capacity=10**9, batch_size=10**9)  # nothing is trained on, and nobody is held back


def serving_seconds(costs: Costs, messages: int, rows: int) -> float:
    """Return the seconds of the server thread for a batch of this many messages and rows."""
    return messages * (costs.message + costs.row * rows) + costs.batch + costs.batch_row * messages * rows


def test_one_actor_with_one_group_has_no_queue_and_its_rate_is_rows_over_cycle() -> None:
    shape = dataclasses.replace(ENDLESS, groups=1)
    link = Link(latency=0.005, bandwidth=1e8)
    trip = 2 * link.latency + shape.envs * shape.row_bytes / link.bandwidth + serving_seconds(COSTS, 1, shape.envs)
    outcome = simulate(shape, COSTS, link, jitter=0.0, seconds=20.0)
    assert outcome.rows_per_second == pytest.approx(shape.envs / (COSTS.step + trip), rel=0.005)
    assert (outcome.latency_p50, outcome.latency_p99) == pytest.approx((trip, trip))


def test_two_groups_hide_the_round_trip_behind_the_environments() -> None:
    link = Link(latency=0.005)
    one = simulate(dataclasses.replace(ENDLESS, envs=16, groups=1), COSTS, link, jitter=0.0)
    two = simulate(ENDLESS, COSTS, link, jitter=0.0)
    assert two.rows_per_second == pytest.approx(16 / COSTS.step, rel=0.01)
    assert one.rows_per_second < 0.7 * two.rows_per_second


def test_saturated_server_gives_one_row_per_cost_of_a_row() -> None:
    shape = dataclasses.replace(ENDLESS, actors=100, envs=128)
    per_row = serving_seconds(COSTS, 4, 64) / 256
    outcome = simulate(shape, COSTS)
    assert outcome.rows_per_second == pytest.approx(1 / per_row, rel=0.01)
    assert outcome.server_busy == pytest.approx(1.0, abs=0.01)


def test_saturated_link_gives_its_bandwidth() -> None:
    shape, link = dataclasses.replace(ENDLESS, actors=50), Link(bandwidth=20e6)
    assert simulate(shape, COSTS, link).rows_per_second == pytest.approx(20e6 / shape.row_bytes, rel=0.01)


def test_saturated_learner_trains_what_it_can_and_holds_actors_back() -> None:
    shape = Shape(actors=4, batch_size=32)
    costs = dataclasses.replace(COSTS, update=0.5)
    outcome = simulate(shape, costs, warm_up=20.0, seconds=50.0)
    assert outcome.rows_per_second == pytest.approx(32 * 20 / 0.5, rel=0.03)
    assert outcome.learner_wait == pytest.approx(0.0, abs=0.01)
    assert outcome.hold > 0.3


def test_saturated_server_beside_a_learner_does_one_thing_at_a_time() -> None:
    shape = Shape(actors=100, envs=128, batch_size=256, capacity=12_800)
    outcome = simulate(shape, dataclasses.replace(COSTS, update=0.05), warm_up=20.0, seconds=20.0)
    assert outcome.rows_per_second == pytest.approx(256 / serving_seconds(COSTS, 4, 64), rel=0.02)
    assert outcome.server_busy == pytest.approx(1.0, abs=0.01)


def test_learner_with_too_few_actors_waits_for_the_rest_of_its_time() -> None:
    costs = dataclasses.replace(COSTS, update=0.2)
    outcome = simulate(Shape(), costs, warm_up=20.0, seconds=200.0)
    assert outcome.rows_per_second == pytest.approx(16 / 0.02, rel=0.01)
    assert outcome.learner_wait == pytest.approx(1 - 0.2 * outcome.rows_per_second / (32 * 20), abs=0.01)
    assert outcome.hold == 0.0


@pytest.mark.parametrize("actors", [1, 7, 60])
@pytest.mark.parametrize("update", [0.0, 0.05])
def test_littles_law_holds_for_messages_on_their_way(actors: int, update: float) -> None:
    shape = Shape(actors=actors, batch_size=16)
    outcome = simulate(shape, dataclasses.replace(COSTS, update=update), Link(0.002, 1e9), warm_up=10, seconds=60)
    rate = outcome.rows_per_second / shape.rows
    assert outcome.in_flight == pytest.approx(rate * outcome.latency_mean, rel=0.02)
    assert outcome.in_flight <= shape.actors * shape.groups


def test_ranks_without_a_common_cost_carry_as_many_times_as_much() -> None:
    costs = dataclasses.replace(COSTS, update=0.1)
    one = simulate(Shape(actors=10), costs, jitter=0.0, warm_up=5, seconds=20)
    four = simulate(Shape(actors=40, ranks=4), costs, jitter=0.0, warm_up=5, seconds=20)
    assert four.rows_per_second == pytest.approx(4 * one.rows_per_second, rel=0.02)
    assert four.policy_lag == pytest.approx(one.policy_lag, rel=0.05)


def test_ranks_that_agree_on_updates_pay_for_it_in_every_one() -> None:
    costs = dataclasses.replace(COSTS, update=0.5, publish=0.25)
    outcome = simulate(Shape(actors=20, ranks=2), costs, warm_up=20, seconds=60)
    assert outcome.rows_per_second == pytest.approx(2 * 32 * 20 / 0.75, rel=0.03)
    assert outcome.learner_wait == pytest.approx(1 / 3, abs=0.02)


def test_policy_lag_is_what_waits_in_store_and_slots_over_a_train_batch() -> None:
    """Held back, an unroll waits for the whole store; before, its rows wait for half an unroll of all other slots."""
    costs = Costs(step=0.001, update=0.1)

    def lag(capacity: int, actors: int) -> float:
        shape = Shape(actors=actors, envs=32, groups=1, batch_size=32, capacity=capacity)
        return simulate(shape, costs, warm_up=20, seconds=60).policy_lag

    assert lag(320, 1) - lag(64, 1) == pytest.approx((320 - 64) / 32, abs=0.5)
    assert lag(64, 17) - lag(64, 1) == pytest.approx(16 / 2, abs=0.5)


@pytest.mark.parametrize(("ranks", "seconds"), [(1, 0.0), (2, 0.012), (4, 0.021)])
def test_all_reduce_of_a_ring(ranks: int, seconds: float) -> None:
    assert all_reduce_seconds(ranks, 1e7, Link(0.001, 1e9)) == pytest.approx(seconds)
    assert all_reduce_seconds(ranks, 1e7, Link(0.0, INFINITE)) == 0.0


def test_simulation_is_repeatable() -> None:
    def once(seed: int) -> Outcome:
        return simulate(Shape(actors=5), dataclasses.replace(COSTS, update=0.1), seed=seed)

    assert once(3) == once(3)
    assert once(3) != once(4)


# Where its costs come from.


def measured(costs: Costs) -> Document:
    """Results as a machine with these costs gives them."""
    plain = {"bytes per row": 84 * 84, "in flight": 2, "actors": 1, "transport": "unix"}
    wire: list[dict[str, Any]] = [
        {"side": "stream", "rows": rows, "rows per second": rows / (costs.message + rows * costs.row), **plain}
        for rows in (1, 16, 64, 256)
    ]
    sides = {"service, 2 in flight": (128, 1), "service, batches of 128": (256, 2), "service": (512, 4)}
    service: list[dict[str, Any]] = [
        {"side": side, "actors": 1, "envs": envs, "rows per second": count * 64 / serving_seconds(costs, count, 64)}
        for side, (envs, count) in sides.items()
    ]
    service.append({"side": "half load", "p50 ms": 6.0, "p99 ms": 8.0})
    others = [{**wire[0], "side": "echo"}, {**wire[0], "transport": "tcp"}, {**wire[0], "bytes per row": 16}]
    tables = {"wire": [*wire, *others], "service": [*service, {**service[-2], "actors": 64}]}
    return Document({}, [{"stage": stage, "table": table, "ratios": {}} for stage, table in tables.items()])


def test_costs_of_the_server_thread_are_found_in_what_was_measured() -> None:
    known = Costs(step=0.0, message=200e-6, row=6e-6, batch=300e-6)
    found = simulation.serving_costs(measured(known))
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(known))


def test_check_of_a_machine_that_is_as_simulated_finds_no_difference() -> None:
    known = Costs(step=0.0, message=200e-6, row=6e-6, batch=300e-6)
    report = Report("simulation")
    simulation.check_service(report, measured(known), known)
    rates = [row["simulated"] / row["measured"] for row in report.table if row["of"] == "rows/s"]
    assert rates == pytest.approx([1.0, 1.0, 1.0], rel=0.01)


def test_costs_that_were_never_measured_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no stage pool"):
        simulation.env_seconds(measured(COSTS))


def test_predictions_from_the_results_of_this_repository_say_what_is_the_limit() -> None:
    document = read(Path(simulation.RESULTS))
    serving = simulation.serving_costs(document)
    fast = dataclasses.replace(serving, step=0.02, batch=serving.batch + 1e-3)
    scale = simulation._scaled(fast, Shape(envs=128, groups=2, batch_size=256))

    def limit(actors: int, ranks: int, gigabits: float) -> str:
        shape, costs, link = scale(actors, ranks, gigabits)
        return simulation._limit(shape, link, simulation.settled(shape, costs, link))

    assert limit(2, 1, 10) == "environments"
    assert limit(64, 1, 10) == "server thread"
    assert limit(64, 1, 1) == "link"
    assert limit(64, 16, 10) == "environments"
