"""Weights or observations: the arithmetic from measured parts to the crossover."""

from dataclasses import replace

import pytest

from bench.weights_or_observations import CASES, CHUNK, Costs, Replica, crossover_words

COSTS = Costs(
    observation=20.0,
    unroll_row=10.0,
    transmit=900.0,
    serialise=320.0,
    load=90.0,
    actor_forward=30.0,
    central_forward=40.0,
)


def test_crossover_is_where_both_cost_the_same() -> None:
    steps = COSTS.crossover(accelerator=False)
    assert steps == pytest.approx(1000 / 20)
    assert COSTS.weights(steps) == pytest.approx(COSTS.observations(accelerator=False))
    assert COSTS.weights(steps / 2) > COSTS.observations(accelerator=False) > COSTS.weights(2 * steps)


def test_crossover_with_an_accelerator_forgets_the_central_forward() -> None:
    assert COSTS.crossover(accelerator=True) is None
    cheap_actor = replace(COSTS, actor_forward=5.0)
    assert cheap_actor.crossover(accelerator=True) == pytest.approx(1000 / 5)


def test_crossover_in_words() -> None:
    assert crossover_words(None) == "always"
    assert crossover_words(1234.5) == "up to 1,234 steps"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replica_can_do_everything_an_actor_with_weights_does(case: object) -> None:
    replica = Replica(case)  # type: ignore[arg-type]
    assert replica.serialise() == replica.load() == 1
    assert replica.forward(32) == 32
    assert replica.weight_bytes > 1000


def test_cases_unrolls_fit_into_one_message() -> None:
    for case in CASES:
        assert case.unroll_rows * case.unroll_row_bytes <= CHUNK
