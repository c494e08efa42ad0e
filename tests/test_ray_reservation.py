"""Tests of what is reserved of a Ray cluster for a job, without a cluster."""

import pytest

from seedrl.config import Placement, RoleConfig, RunConfig
from seedrl.errors import ConfigError
from seedrl.launching.placement import Node, place
from seedrl.launching.ray_reservation import plan_reservation

THREE = [Node("a", 4), Node("b", 4), Node("c", 4)]


def job(*placement: str, ranks: int = 1, actors: int = 2, per_node: int = 0) -> RunConfig:
    config = RunConfig()
    config.ranks.count, config.actors.count = ranks, actors
    config.launch.placement = [Placement[name] for name in placement]
    config.launch.per_node = per_node
    return config


@pytest.mark.parametrize(
    ("config", "strategy", "sizes"),
    [
        (job(), "PACK", [1, 1, 1]),
        (job("spread"), "SPREAD", [1, 1, 1]),
        (job("collocate"), "STRICT_PACK", [1, 1, 1]),
        (job("collocate", "spread", ranks=2, actors=4), "SPREAD", [3, 3]),
        (job("collocate", ranks=5, actors=3), "PACK", [4, 4]),
        (job(per_node=1, actors=3), "STRICT_SPREAD", [2, 1, 1]),
        (job("spread", per_node=2, actors=6), "STRICT_SPREAD", [3, 2, 2]),
        (job("collocate", per_node=2, actors=2), "STRICT_SPREAD", [3]),
    ],
)
def test_bundle_is_a_process_unless_processes_must_stay_together_or_apart(
    config: RunConfig, strategy: str, sizes: list[int]
) -> None:
    decided = plan_reservation(config, place(config, THREE))
    assert (decided.strategy, [len(bundle.places) for bundle in decided.bundles]) == (strategy, sizes)


def test_bundle_asks_for_all_that_its_processes_need() -> None:
    config = job(per_node=2)
    config.launch.learner = RoleConfig(cpus=2, gpus=0.5, selector={"gpu": "a100"})
    config.launch.actor = RoleConfig(cpus=0.5, memory_gb=1.5, selector={"zone": "1"})
    node = Node("a", 4, gpus=1, labels=frozenset({("gpu", "a100"), ("zone", "1")}))
    (bundle,) = plan_reservation(config, place(config, [node])).bundles
    assert bundle.resources == {"CPU": 3.0, "GPU": 0.5, "memory": 3 * 2**30}
    assert bundle.labels == {"gpu": "a100", "zone": "1"}


def test_role_that_asks_for_nothing_is_refused() -> None:
    config = job()
    config.launch.actor = RoleConfig(cpus=0)
    with pytest.raises(ConfigError, match=r"launch.actor needs no resource"):
        plan_reservation(config, place(config, THREE))
