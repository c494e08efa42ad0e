"""On-policy runs over a real stream: every transition is of the newest policy, and the updates are those of PPO."""

import copy
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from seedrl.actions import Actions
from seedrl.algorithms.ppo import PPO
from seedrl.algorithms.settings import AlgorithmConfig
from seedrl.types import Unrolls
from tests.builders import weights
from tests.fakes import FakePool
from tests.integration.conftest import StartActor, StartLearner
from tests.integration.support import eventually
from tests.test_ppo import everything, ppo_config, slow_loss

UPDATES = 6


class Seen(NamedTuple):
    unrolls: Unrolls
    model: nn.Module  # with the weights before the update


class Recorded(PPO):
    """PPO that remembers its train batches."""

    seen: ClassVar[list[Seen]] = []

    def __init__(self, config: AlgorithmConfig, actions: Actions, model: nn.Module) -> None:
        super().__init__(config, actions, model)
        Recorded.seen.clear()

    def batches(self, unrolls: Unrolls) -> Any:
        Recorded.seen.append(Seen(unrolls.tree_map(Tensor.clone), copy.deepcopy(self._model)))
        return super().batches(unrolls)


def test_on_policy_run_makes_the_updates_of_synchronous_ppo(
    start_learner: StartLearner, start_actor: StartActor
) -> None:
    """Four environments in two groups, train batches of two unrolls each; weights by a slow transcription."""
    settings = ppo_config(passes=2, minibatches=2, on_policy=True, unroll_length=6, batch_size=8, learning_rate=0.01)
    given = {f"algorithm__{name}": getattr(settings, name) for name in vars(settings)}
    learner = start_learner(
        **{**given, "algorithm__name": f"{__name__}:Recorded", "model__name": "tests.fakes:TinyModel"}
    )
    start_actor(learner.address, FakePool)
    eventually(lambda: len(Recorded.seen) > UPDATES or learner.ended())
    seen = Recorded.seen[: UPDATES + 1]

    for number, (unrolls, _) in enumerate(seen):
        # One row of each unroll, or two of a group that was ahead, came before the update; they are not trained on.
        assert (unrolls.policy_version[2:-1] == number).all()
        assert (unrolls.policy_version[:2] >= number - 1).all()

    slow, turn = copy.deepcopy(seen[0].model), 0
    optimizer = torch.optim.Adam(slow.parameters(), lr=0.01, eps=1e-5)
    for (unrolls, _), (_, after) in pairwise(seen):
        newest = unrolls.policy_version[:-1] == unrolls.policy_version.max()
        cells = everything(unrolls)
        for _ in range(2):
            order = torch.randperm(len(cells), generator=torch.Generator().manual_seed(turn)).tolist()
            turn += 1
            for part in np.array_split(order, 2):
                optimizer.zero_grad()
                slow_loss(
                    slow, unrolls, settings, [cells[number] for number in part if newest[cells[number]]]
                ).backward()
                nn.utils.clip_grad_norm_(slow.parameters(), settings.max_grad_norm)
                optimizer.step()
        for name, expected in weights(slow).items():
            torch.testing.assert_close(weights(after)[name], expected, rtol=1e-3, atol=1e-4)
