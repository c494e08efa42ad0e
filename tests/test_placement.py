"""Where the processes of a job go, and the sentence for those that fit nowhere."""

from collections import Counter

import pytest

from seedrl.config import Placement, RoleConfig, RunConfig
from seedrl.errors import ConfigError
from seedrl.launching.placement import ACTOR, LEARNER, Node, place

THREE = [Node("a", 4), Node("b", 4), Node("c", 4)]


def job(ranks: int = 1, actors: int = 2, placement: tuple[str, ...] = (), per_node: int = 0) -> RunConfig:
    config = RunConfig()
    config.ranks.count, config.actors.count = ranks, actors
    config.launch.placement = [Placement[name] for name in placement]
    config.launch.per_node = per_node
    return config


def actors_by_node(config: RunConfig, nodes: list[Node]) -> dict[str, int]:
    return dict(Counter(each.node for each in place(config, nodes) if each.role == ACTOR))


def test_processes_are_packed_unless_asked_otherwise() -> None:
    assert actors_by_node(job(actors=4), THREE) == {"a": 3, "b": 1}


def test_spread_takes_the_emptiest_machine() -> None:
    assert actors_by_node(job(actors=6, placement=("spread",)), THREE) == {"a": 2, "b": 2, "c": 2}


def test_per_node_is_a_limit() -> None:
    assert actors_by_node(job(actors=3, per_node=1), THREE) == {"a": 1, "b": 1, "c": 1}


def test_collocated_actors_stay_where_ranks_are() -> None:
    config = job(ranks=2, actors=4, placement=("collocate", "spread"), per_node=2)
    places = place(config, THREE)
    assert {each.node for each in places if each.role == LEARNER} == {"a", "b"}
    assert actors_by_node(config, THREE) == {"a": 2, "b": 2}


def test_fractions_of_an_accelerator_add_up_to_a_whole_one() -> None:
    config = job(ranks=10, actors=0)
    config.launch.learner = RoleConfig(cpus=0, gpus=0.1)
    assert len(place(config, [Node("a", 1, gpus=1)])) == 10


def test_labels_decide_which_machines_count() -> None:
    config = job(actors=0)
    config.launch.learner = RoleConfig(selector={"disk": "fast"})
    nodes = [*THREE, Node("d", 1, labels=frozenset({("disk", "fast"), ("zone", "1")}))]
    assert [each.node for each in place(config, nodes)] == ["d"]
    with pytest.raises(ConfigError, match="learner 0 fits on no machine: it needs 1 cores, the label disk=fast"):
        place(config, THREE)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (job(actors=12), r"actor 11 fits on no machine: it needs 1 cores, and a has 0 cores left beside 1 learners"),
        (job(actors=12), r"launch.actor.cpus says what each needs, and may be a fraction; actors.count says how many"),
        (job(actors=4, per_node=1), r"actor 3 fits on no machine, 1 on a machine"),
        (job(actors=4, placement=("collocate",)), r"actor 3 fits on no machine beside a rank"),
        (job(per_node=-1), r"launch.per_node=-1 must not be negative"),
    ],
)
def test_refusal_names_who_fits_nowhere_and_why(config: RunConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        place(config, THREE)


def test_refusal_without_any_machine() -> None:
    with pytest.raises(ConfigError, match="there is no machine"):
        place(job(), [])
