"""Attacks on a learner cost a bounded amount of memory, spare the healthy actor, and leave a line in the log."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.chaos import attacks
from tests.chaos.attacks import Attack, Victim

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


GAP = 2.0  # the server thread does nothing for a message that is too long, or compressed


class Bound(NamedTuple):
    """The most that an attack may cost. Rates of a shared machine vary, so the healthy actor's only has a low bound."""

    attack: Attack
    mib: float
    share: float  # of its usual rate that the healthy actor keeps
    log: str  # words in the log
    seen: str  # by the attacker
    gap: float = GAP  # the most seconds between two answers of the healthy actor


TOO_LONG, EARLY = "RESOURCE_EXHAUSTED", "(ipv4:127.0.0.1:"
BOUNDS = (
    Bound(attacks.step_of_empty_blobs, 16, 0.05, EARLY, TOO_LONG),
    Bound(attacks.ready_of_tiny_leaves, 16, 0.05, EARLY, TOO_LONG),
    Bound(attacks.large_before_hello, 16, 0.05, EARLY, TOO_LONG),
    Bound(attacks.compressed, 16, 0.05, "", "UNIMPLEMENTED"),
    Bound(attacks.blocked_client, 16, 0.05, "", ""),
    Bound(attacks.eager_pings, 16, 0.05, "", ""),
    Bound(attacks.slow_pages, 16, 0.05, "", "0 of 40 probes failed"),
    Bound(attacks.absurd_observations, 16, 0.05, "serving.max_observation", "INVALID_ARGUMENT"),
    Bound(attacks.absurd_rewards, 16, 0.05, "serving.max_reward", "INVALID_ARGUMENT"),
)
FLOODS = (attacks.ping_flood, attacks.large_headers, attacks.continuation_flood)


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    with attacks.victim(tmp_path) as victim:
        yield victim
        assert victim.process.is_running
        assert "Traceback" not in victim.process.err


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda bound: bound.attack.__name__)
def test_attack_costs_a_bounded_amount_and_the_healthy_actor_continues(victim: Victim, bound: Bound) -> None:
    outcome = victim.under(bound.attack)
    print(f"\n{bound.attack.__name__}: {outcome}; attacker saw {outcome.seen}")
    assert outcome.grew_mib <= bound.mib
    assert outcome.share >= bound.share
    assert outcome.gap <= bound.gap
    assert bound.log in outcome.log
    assert bound.seen in outcome.seen
    assert victim.healthy().sessions == 1


@pytest.mark.parametrize("attack", [attacks.blocked_client, attacks.eager_pings], ids=lambda attack: attack.__name__)
def test_client_that_blocks_for_eight_seconds_or_pings_every_two_keeps_its_session(
    victim: Victim, attack: Attack
) -> None:
    outcome = victim.under(attack)
    assert outcome.seen.isdecimal(), outcome.seen  # the number of its newest step


@pytest.mark.parametrize("attack", FLOODS, ids=lambda attack: attack.__name__)
def test_flood_that_grpc_itself_cannot_bear_is_survived(victim: Victim, attack: Attack) -> None:
    """gRPC's own server pays for these before any of our code runs (docs/security.md); the learner outlives them."""
    outcome = victim.under(attack)
    print(f"\n{attack.__name__}: {outcome}; attacker saw {outcome.seen}")
    assert math.isfinite(outcome.grew_mib)
    victim.goes_on(1000)
