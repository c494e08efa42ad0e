"""An algorithm and a selector of the user's own, each in one file, train over a real stream with no edit elsewhere."""

import sys
from pathlib import Path

import pytest

from tests.integration.conftest import StartActor, StartLearner
from tests.integration.support import eventually

ALGORITHM = '''
"""REINFORCE without a value function: enough to show what an algorithm needs."""

from seedrl.algorithms.base import Loss
from seedrl.algorithms.transitions import transitions, valid_transitions


class Reinforce:
    overlap = 1

    def __init__(self, config, actions, model, gain=1.0):
        self.config, self.actions, self.gain, self.steps = config, actions, gain, 0

    def valid(self, unrolls):
        return valid_transitions(unrolls)

    def batches(self, unrolls):
        yield unrolls

    def loss(self, unrolls, forward, fraction):
        output, _ = forward(unrolls.inputs, unrolls.core_state)
        step = transitions(unrolls, self.config)
        log_prob = self.actions.log_prob(output.logits[:-1], step.action_t)
        total = -(step.weight_t * step.reward_tp1 * log_prob).sum() * self.gain + 0.0 * output.value.sum()
        report = {"mean_log_prob": (step.weight_t * log_prob).sum().detach()}
        return Loss(total, report, priority=log_prob.abs().mean(0))

    def stepped(self, loss):
        self.steps += 1

    def tensors(self):
        return {}

    def load(self, tensors):
        pass
'''

SELECTOR = '''
"""Uniform replay: every unroll as often as the learner likes, the oldest ones make room."""

import numpy as np
from seedrl.selectors import Pick


class Uniform:
    def __init__(self, capacity, batch_size, seed, least=1):
        self.random, self.known, self.picked, self.least = np.random.default_rng(seed), [], set(), least
        self.preferred = 0

    def __len__(self):
        return len(self.known)

    def add(self, entries):
        self.known.extend(entries.tolist())

    def can_pick(self, count):
        return len(self.known) >= max(count, self.least)

    def pick(self, count):
        entries = self.random.choice(self.known, count, replace=False)
        self.picked.update(entries.tolist())
        return Pick(entries, np.ones(count, np.float32))

    def done(self, entries):
        self.picked.difference_update(entries.tolist())
        return np.empty(0, np.int64)

    def evict(self, count):
        oldest = [entry for entry in self.known if entry not in self.picked][:count]
        self.known = [entry for entry in self.known if entry not in oldest]
        return np.array(oldest, np.int64)

    def prefer(self, entries, priority):
        assert (priority >= 0).all()
        self.preferred += len(entries)
'''


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "throwaway_algorithm.py").write_text(ALGORITHM)
    (tmp_path / "throwaway_selector.py").write_text(SELECTOR)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("throwaway_algorithm", "throwaway_selector"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("written")
def test_algorithm_of_ones_own_trains_over_a_real_stream(start_learner: StartLearner, start_actor: StartActor) -> None:
    learner = start_learner(algorithm__name="throwaway_algorithm:Reinforce", algorithm__options={"gain": 2.0})
    start_actor(learner.address)
    learning = learner.service.learning
    eventually(lambda: learning.updates >= 12)
    assert learning.skipped_updates == 0
    assert set(learning.algorithm) == {"loss", "mean_log_prob"}


@pytest.mark.usefixtures("written")
def test_selector_of_ones_own_replays_over_a_real_stream(start_learner: StartLearner, start_actor: StartActor) -> None:
    """The ring is always full and the actors are never held back; priorities come back to the selector."""
    learner = start_learner(
        algorithm__name="throwaway_algorithm:Reinforce",
        store__select="throwaway_selector:Uniform",
        store__options={"least": 8},
        store__capacity=16,
    )
    actor = start_actor(learner.address)
    learning, serving = learner.service.learning, learner.service.serving
    eventually(lambda: learning.updates >= 20 and serving.unrolls_made > 32)
    assert learner.service.training is not None
    store = learner.service.training.store
    assert store._selector.preferred > 0  # type: ignore[attr-defined]
    assert store.ready >= 8
    assert not actor.ended()
