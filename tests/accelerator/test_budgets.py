"""The work that an accelerator is given per batch and per update, in exact numbers."""

from collections import Counter
from typing import NamedTuple

import pytest

from seedrl.config import ModelConfig
from seedrl.serving.buckets import bucket_sizes
from seedrl.serving.seats import EVALUATION, Exploration, Seat
from seedrl.specs import ArraySpec, EnvSpec, discrete
from tests.accelerator.rig import BATCH, Loop
from tests.accelerator.simulated import GPU, counted
from tests.accelerator.streams import WAITS

VECTOR = EnvSpec(ArraySpec((4,), "float32"), discrete(3))
IMAGE = EnvSpec(ArraySpec((1, 36, 36), "uint8"), discrete(3))
EXPLORING = [Seat(exploration=Exploration(2.0, 0.1)), EVALUATION]
STEPS = 20


class Cost(NamedTuple):
    """Copies for which the host waits, other waits of the host, copies to the device, kernels."""

    syncs: int
    waits: int
    uploads: int
    launches: int


def cost(counts: Counter[str], waits: int) -> Cost:
    return Cost(counts["sync"], waits, counts["upload"], counts["launch"])


def batch_costs(
    config: ModelConfig, spec: EnvSpec, requests: int, seats: list[Seat] | None = None, graphs: bool = False
) -> list[Cost]:
    """Return what each batch of an unroll costs, complete unrolls included."""
    rows, frame_stack = 2 * requests, 4 if spec is IMAGE else 1
    sizes = {"slots": rows, "frame_stack": frame_stack, "unroll_length": STEPS}
    rig = Loop(spec, config, GPU, **sizes, sizes=bucket_sizes(rows), graphs=graphs)  # type: ignore[arg-type]
    rig.inference.warm_up(rows)
    sessions, costs = rig.join_all(requests, seats), []
    for _ in range(STEPS + 2):
        batch = rig.requests(sessions)
        WAITS.clear()
        counts = counted(lambda batch=batch: (rig.inference.run(batch), rig.inference.finish_unrolls()))
        costs.append(cost(counts, len(WAITS)))
    return costs


@pytest.mark.parametrize(
    ("config", "spec", "requests", "seats", "ordinary", "last"),
    [
        (ModelConfig(name="nature"), IMAGE, 1, None, Cost(0, 1, 2, 27), Cost(0, 1, 3, 33)),
        (ModelConfig(name="nature"), IMAGE, 16, None, Cost(0, 1, 2, 27), Cost(0, 1, 3, 33)),
        (ModelConfig(name="nature", lstm=8), IMAGE, 4, None, Cost(0, 1, 2, 50), Cost(0, 1, 3, 58)),
        (ModelConfig(name="nature"), IMAGE, 4, EXPLORING, Cost(0, 1, 2, 61), Cost(0, 1, 4, 73)),
        (ModelConfig(name="mlp"), VECTOR, 1, None, Cost(0, 1, 2, 26), Cost(0, 1, 3, 32)),
    ],
    ids=["one request", "16 requests", "memory", "exploration and evaluation", "vectors"],
)
def test_batch_costs(
    config: ModelConfig, spec: EnvSpec, requests: int, seats: list[Seat] | None, ordinary: Cost, last: Cost
) -> None:
    costs = batch_costs(config, spec, requests, seats)
    assert (costs[5], costs[STEPS]) == (ordinary, last)


@pytest.mark.parametrize("requests", [1, 16])
@pytest.mark.parametrize("lstm", [0, 8])
def test_batch_costs_with_graphs(requests: int, lstm: int) -> None:
    costs = batch_costs(ModelConfig(name="nature", lstm=lstm), IMAGE, requests, graphs=True)
    assert costs[5] == Cost(0, 1, 2, 2)  # the noise and the graph


@pytest.mark.parametrize(
    ("config", "train"),
    [(ModelConfig(name="nature"), Cost(0, 1, 0, 306)), (ModelConfig(name="nature", lstm=8), Cost(1, 1, 3, 643))],
    ids=["images", "memory"],
)
def test_update_costs(config: ModelConfig, train: Cost) -> None:
    rig = Loop(IMAGE, config, GPU, frame_stack=4, unroll_length=STEPS)
    sessions = rig.join_all()
    for _ in range(3 * STEPS):
        rig.step(sessions)
    rig.update()  # reports, which follow only some updates
    WAITS.clear()
    taken = []
    take = counted(lambda: taken.append(rig.store.take(BATCH, timeout=0)))
    assert cost(take, len(WAITS)) == Cost(0, 1, 1, 4)
    WAITS.clear()
    assert cost(counted(lambda: rig.learner.train(taken[0])), len(WAITS)) == train
    WAITS.clear()
    assert cost(counted(lambda: rig.learner.publish(rig.policy)), len(WAITS)) == Cost(0, 1, 0, 1)
